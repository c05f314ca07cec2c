"""The weights of one layer of a DFlash drafter, as PyTorch computes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hedgerow.model.convolution import GroupedConvolution
from hedgerow.model.draft_config import DraftConfig
from hedgerow.model.loader import Checkpoint
from kernels.linear import column_blocks


@dataclass(frozen=True)
class DraftLayer:
    """Weights of one layer, [K, N]."""

    input_norm: torch.Tensor
    qkv: torch.Tensor  # [hidden, (heads + 2 kv heads) * head_dim]
    qk_norm: torch.Tensor  # [heads + kv heads, head_dim]
    o: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor  # in `column_blocks`
    down: torch.Tensor
    convolutions: tuple[GroupedConvolution, ...] = ()  # DFlash 2: around attention and MLP

    @classmethod
    def load(cls, checkpoint: Checkpoint, number: int, c: DraftConfig) -> DraftLayer:
        base, h, d = f"layers.{number}.", c.hidden_size, c.head_dim
        q, kv = c.num_attention_heads, c.num_key_value_heads
        attention = [(f"self_attn.{n}_proj", heads * d) for n, heads in (("q", q), ("k", kv), ("v", kv))]
        mlp = [(f"mlp.{n}_proj", c.intermediate_size) for n in ("gate", "up")]
        q_norm = checkpoint.weight(base + "self_attn.q_norm.weight", d)
        k_norm = checkpoint.weight(base + "self_attn.k_norm.weight", d)
        return cls(
            input_norm=checkpoint.weight(base + "input_layernorm.weight", h),
            qkv=torch.cat([checkpoint.weight(f"{base}{n}.weight", rows, h) for n, rows in attention]).T.contiguous(),
            qk_norm=torch.cat([q_norm.expand(q, d), k_norm.expand(kv, d)]),
            o=checkpoint.weight(base + "self_attn.o_proj.weight", h, q * d).T.contiguous(),
            mlp_norm=checkpoint.weight(base + "post_attention_layernorm.weight", h),
            gate_up=column_blocks(torch.cat([checkpoint.weight(f"{base}{n}.weight", rows, h) for n, rows in mlp]).T),
            down=checkpoint.weight(base + "mlp.down_proj.weight", h, c.intermediate_size).T.contiguous(),
            convolutions=GroupedConvolution.both(checkpoint, base, c),
        )

    def convolve(self, half: int, y: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What goes into attention (0) or MLP (1), and the kernel for what comes out of it."""
        return self.convolutions[half].before(y, block) if self.convolutions else (y, None)

    def convolved(self, half: int, out: torch.Tensor, kernel: torch.Tensor | None, block: int) -> torch.Tensor:
        return out if kernel is None else self.convolutions[half].after(out, kernel, block)
