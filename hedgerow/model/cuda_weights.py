"""A K2 target's weights as the GPU's ops read them: bfloat16 [N, K], INT4 words and FP8 experts as stored, some
float32."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from hedgerow.model.config import K2Config
from hedgerow.model.fields import ConfigError
from hedgerow.model.identity import checkpoint_hash
from hedgerow.model.loader import DENSE, FP8, Checkpoint
from hedgerow.model.tensors import BLOCK, GROUP, scale_name, scale_shape
from kernels.gpu.int4_moe_gemm import order_experts, supports
from kernels.gpu.mla_launch import WIDTHS
from kernels.gpu.moe_pack import Ordered

SCALES = (torch.float32, torch.bfloat16)  # of FP8 blocks


class Packed(NamedTuple):
    """A layer's experts in INT4, as `kernels.gpu.int4_moe` reads them."""

    words: torch.Tensor
    scales: torch.Tensor


class Plain(NamedTuple):
    """A layer's experts in FP8 with the scales of their blocks, or in the model's type, as `plain_moe` reads them."""

    values: torch.Tensor
    scales: torch.Tensor | None


Experts = Packed | Plain
Routed = Experts | Ordered  # as `int4_moe_gemm` reads them


def in_order(gate_up: Experts, down: Experts, top_k: int) -> tuple[Routed, Routed]:
    """INT4 experts in the matrix unit's order, in place, where there is code for their widths and device."""
    if isinstance(gate_up, Packed) and isinstance(down, Packed):
        words, scales = down
        if supports(words.shape[1], words.shape[2] * 8, top_k, words.device, scales.dtype):
            return order_experts(gate_up, down)
    return gate_up, down


class Reader:
    """Tensors of one checkpoint on `device`, dense ones in `dtype`.

    Bytes go from the files to the device in their stored types, through pinned memory of a fixed size; what changes its
    type or is unpacked is so there. Each loses nothing that its file holds in bfloat16. A dense matrix of FP8 is code
    times scale in float32, then of `dtype`; experts keep their codes.
    """

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
        parts = [self.checkpoint.part(name, shape) for name, shape in names_and_shapes]
        rows = sum(part[0] for part in parts)
        out = torch.empty((rows, *parts[0][1:]), dtype=self.dtype, device=self.device)
        for (name, shape), place in zip(names_and_shapes, out.split([part[0] for part in parts]), strict=True):
            if not self.checkpoint.into(place, name, shape, (*DENSE, FP8)):
                place.copy_(self.checkpoint.dense(name, shape, self.device))
        return out

    def float32(self, name: str, *shape: int) -> torch.Tensor:
        return self.checkpoint.dense(name, shape, self.device).float()

    def experts(self, names: list[list[str]], rows: int, columns: int, int4: bool) -> Experts:
        """Matrices of one expert below each other, the experts stacked: names[expert][part]."""
        flat = [name for parts in names for name in parts]
        if int4:
            values, scales = self.checkpoint.stacked_packed(flat, rows, columns, self.device)
            return Packed(self.together(values, len(names)), self.together(scales, len(names)).to(self.dtype))
        plain = [f"{name}.weight" for name in flat]
        values = self.checkpoint.stacked(plain, (rows, columns), (*DENSE, FP8), self.device)
        if values.dtype != FP8:
            return Plain(self.together(values, len(names)).to(self.dtype), None)
        blocks = [scale_name(name) for name in plain]
        found = self.checkpoint.stacked(blocks, scale_shape((rows, columns)), SCALES, self.device)
        return Plain(self.together(values, len(names)), self.together(found, len(names)).float())

    @staticmethod
    def together(stacked: torch.Tensor, experts: int) -> torch.Tensor:
        """[experts * parts, N, K] -> [experts, parts * N, K]"""
        return stacked.view(experts, -1, stacked.shape[-1])


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
    gate_up: Routed  # [experts, 2 width, hidden]
    down: Routed  # [experts, hidden, width]

    @classmethod
    def load(cls, r: Reader, base: str, c: K2Config) -> SparseMlp:
        hidden, width, count = c.hidden_size, c.moe_intermediate_size, c.n_routed_experts
        shared = width * c.n_shared_experts
        parts = [(f"{base}shared_experts.{name}.weight", (shared, hidden)) for name in ("gate_proj", "up_proj")]
        experts = [f"{base}experts.{e}." for e in range(count)]
        first = r.experts([[e + "gate_proj", e + "up_proj"] for e in experts], width, hidden, c.int4_experts)
        second = r.experts([[e + "down_proj"] for e in experts], hidden, width, c.int4_experts)
        gate_up, down = in_order(first, second, c.num_experts_per_tok)
        return cls(
            shared_router=r.dense(*parts, (base + "gate.weight", (count, hidden))),
            shared_down=r.dense((base + "shared_experts.down_proj.weight", (hidden, shared))),
            bias=r.float32(base + "gate.e_score_correction_bias", count),
            gate_up=gate_up,
            down=down,
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
        kv_b = kv_b.view(-1, nope + value, c.kv_lora_rank)  # of the share's heads
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


def check_sizes(c: K2Config, file: Path, shards: int = 1, real: bool = True) -> None:
    """ConfigError, about config.json at `file`, for sizes that the GPU's ops have no code for, on one of `shards`
    ranks. Not `real`: under Triton's interpreter, whose attention takes any power of two."""
    if real and (c.kv_lora_rank, c.qk_rope_head_dim) not in WIDTHS:
        pairs = " or ".join(f"{latent} beside {rope}" for latent, rope in WIDTHS)
        limit = f"{pairs}, on a CUDA device; qk_rope_head_dim, beside it, is {c.qk_rope_head_dim}"
        raise ConfigError(file, "kv_lora_rank", c.kv_lora_rank, limit)
    for name in ("kv_lora_rank", "qk_rope_head_dim"):
        size = getattr(c, name)
        if size < 16 or size & (size - 1):
            raise ConfigError(file, name, size, "a power of two from 16 on, on a CUDA device")
    unit = BLOCK if c.fp8 else GROUP
    for name, ranks in (("hidden_size", 1), ("moe_intermediate_size", shards)):
        if getattr(c, name) % (unit * ranks):
            among = f" with {ranks} ranks" if ranks > 1 else ""
            raise ConfigError(file, name, getattr(c, name), f"a multiple of {unit * ranks}, on a CUDA device{among}")
