"""A K2 target's weights as the GPU's ops read them: bfloat16 [N, K], INT4 words as stored, some float32."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from hedgerow.model.config import K2Config
from hedgerow.model.fields import ConfigError
from hedgerow.model.identity import checkpoint_hash
from hedgerow.model.loader import Checkpoint

Packed = tuple[torch.Tensor, torch.Tensor]  # words, scales


class Reader:
    """Tensors of one checkpoint, in `dtype` on `device`. Each loses nothing that its file holds in bfloat16."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self.checkpoint, self.device, self.dtype = checkpoint, device, dtype

    @property
    def folder(self) -> Path:
        return self.checkpoint.folder

    @property
    def hash(self) -> str:
        return checkpoint_hash(self.folder)

    def dense(self, *names_and_shapes: tuple[str, tuple[int, ...]]) -> torch.Tensor:
        """These tensors, one below the other."""
        parts = [self.checkpoint.weight(name, *shape) for name, shape in names_and_shapes]
        return torch.cat(parts).to(self.device, self.dtype)

    def float32(self, name: str, *shape: int) -> torch.Tensor:
        return self.checkpoint.weight(name, *shape).to(self.device)

    def packed(self, names: list[list[str]], rows: int, columns: int) -> Packed:
        """INT4 matrices of one expert below each other, the experts stacked: names[expert][part]."""
        read = [[self.checkpoint.packed(name, rows, columns) for name in parts] for parts in names]
        words = torch.stack([torch.cat([part.words for part in parts]) for parts in read])
        scales = torch.stack([torch.cat([part.scales for part in parts]) for parts in read])
        return words.to(self.device), scales.to(self.device, self.dtype)


@dataclass(frozen=True)
class DenseMlp:
    gate_up: torch.Tensor  # [2 width, hidden]
    down: torch.Tensor  # [hidden, width]

    @classmethod
    def load(cls, r: Reader, base: str, width: int, hidden: int) -> DenseMlp:
        gate_up = r.dense(*((f"{base}{name}.weight", (width, hidden)) for name in ("gate_proj", "up_proj")))
        return cls(gate_up, r.dense((base + "down_proj.weight", (hidden, width))))


@dataclass(frozen=True)
class SparseMlp:
    """The router's rows stand below the shared expert's: one product gives both."""

    shared_router: torch.Tensor  # [2 shared width + experts, hidden]
    shared_down: torch.Tensor  # [hidden, shared width]
    bias: torch.Tensor  # [experts] float32
    gate_up: Packed  # [experts, 2 width, hidden]
    down: Packed  # [experts, hidden, width]

    @classmethod
    def load(cls, r: Reader, base: str, c: K2Config) -> SparseMlp:
        hidden, width, count = c.hidden_size, c.moe_intermediate_size, c.n_routed_experts
        shared = width * c.n_shared_experts
        parts = [(f"{base}shared_experts.{name}.weight", (shared, hidden)) for name in ("gate_proj", "up_proj")]
        experts = [f"{base}experts.{e}." for e in range(count)]
        return cls(
            shared_router=r.dense(*parts, (base + "gate.weight", (count, hidden))),
            shared_down=r.dense((base + "shared_experts.down_proj.weight", (hidden, shared))),
            bias=r.float32(base + "gate.e_score_correction_bias", count),
            gate_up=r.packed([[e + "gate_proj", e + "up_proj"] for e in experts], width, hidden),
            down=r.packed([[e + "down_proj"] for e in experts], hidden, width),
        )


@dataclass(frozen=True)
class CudaLayer:
    """One decoder layer. W_UK and W_UV are kv_b's two parts, per head; the softmax scale is the attention's."""

    attention_norm: torch.Tensor
    qkv_a: torch.Tensor  # [q_lora + kv_lora + rope, hidden]
    q_norm: torch.Tensor
    kv_norm: torch.Tensor
    q_b: torch.Tensor  # [heads * (nope + rope), q_lora]
    uk: torch.Tensor  # [heads, kv_lora, nope]
    uv: torch.Tensor  # [heads, value, kv_lora]
    o: torch.Tensor  # [hidden, heads * value]
    mlp_norm: torch.Tensor
    mlp: DenseMlp | SparseMlp

    @classmethod
    def load(cls, r: Reader, number: int, c: K2Config) -> CudaLayer:
        base, hidden = f"model.layers.{number}.", c.hidden_size
        own, mlp = base + "self_attn.", base + "mlp."
        heads, nope, rope, value = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
        kv_b = r.dense((own + "kv_b_proj.weight", (heads * (nope + value), c.kv_lora_rank)))
        kv_b = kv_b.view(heads, nope + value, c.kv_lora_rank)
        sparse = number >= c.first_k_dense_replace
        return cls(
            attention_norm=r.dense((base + "input_layernorm.weight", (hidden,))),
            qkv_a=r.dense(
                (own + "q_a_proj.weight", (c.q_lora_rank, hidden)),
                (own + "kv_a_proj_with_mqa.weight", (c.latent_width, hidden)),
            ),
            q_norm=r.dense((own + "q_a_layernorm.weight", (c.q_lora_rank,))),
            kv_norm=r.dense((own + "kv_a_layernorm.weight", (c.kv_lora_rank,))),
            q_b=r.dense((own + "q_b_proj.weight", (heads * (nope + rope), c.q_lora_rank))),
            uk=kv_b[:, :nope].mT.contiguous(),
            uv=kv_b[:, nope:].contiguous(),
            o=r.dense((own + "o_proj.weight", (hidden, heads * value))),
            mlp_norm=r.dense((base + "post_attention_layernorm.weight", (hidden,))),
            mlp=SparseMlp.load(r, mlp, c) if sparse else DenseMlp.load(r, mlp, c.intermediate_size, hidden),
        )


def check_sizes(c: K2Config, file: Path) -> None:
    """ConfigError, about config.json at `file`, for sizes that the GPU's ops have no code for."""
    if not c.int4_experts:
        raise ConfigError(file, "quantization_config", None, "INT4 experts, on a CUDA device")
    for name in ("kv_lora_rank", "qk_rope_head_dim"):
        size = getattr(c, name)
        if size < 16 or size & (size - 1):
            raise ConfigError(file, name, size, "a power of two from 16 on, on a CUDA device")
    for name in ("hidden_size", "moe_intermediate_size"):
        if getattr(c, name) % 32:
            raise ConfigError(file, name, getattr(c, name), "a multiple of 32, on a CUDA device")
