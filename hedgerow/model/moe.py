"""Feed-forward blocks: the dense SwiGLU of the first layers, and routed experts beside a shared one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hedgerow.model.config import K2Config
from hedgerow.model.loader import Checkpoint
from kernels.int4_moe import ExpertWeights, int4_moe
from kernels.linear import RowLaw, column_blocks, linear, pad_rows, wide_linear
from kernels.moe_route import ROUTER_MULTIPLE, moe_route
from kernels.swiglu import swiglu


@dataclass(frozen=True)
class DenseWeights:
    """SwiGLU: gate and up side by side."""

    gate_up: torch.Tensor  # [hidden, 2 * width], in `column_blocks`
    down: torch.Tensor  # [width, hidden]

    @classmethod
    def load(cls, checkpoint: Checkpoint, base: str, width: int, hidden: int) -> DenseWeights:
        gate_up, down = load_swiglu(checkpoint, base, width, hidden)
        return cls(column_blocks(gate_up), down)


def load_swiglu(checkpoint: Checkpoint, base: str, width: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[gate | up] as [hidden, 2 * width], and down as [width, hidden], where the share has its part of the width."""
    parts = [checkpoint.weight(f"{base}{name}.weight", width, hidden) for name in ("gate_proj", "up_proj")]
    down = checkpoint.weight(f"{base}down_proj.weight", hidden, width)
    return torch.cat(parts).T.contiguous(), down.T.contiguous()


@dataclass(frozen=True)
class MoeWeights:
    """Router, shared and routed experts of a layer. The router's columns follow the shared expert's: one product."""

    shared_router: torch.Tensor  # [hidden, 2 * shared width + E']
    shared_down: torch.Tensor  # [shared width, hidden]
    bias: torch.Tensor  # [E'], -inf past the experts
    experts: ExpertWeights

    @classmethod
    def load(cls, checkpoint: Checkpoint, base: str, c: K2Config) -> MoeWeights:
        hidden, width, count = c.hidden_size, c.moe_intermediate_size, c.n_routed_experts
        held = width // checkpoint.share.ranks
        shared, shared_down = load_swiglu(checkpoint, base + "shared_experts.", width * c.n_shared_experts, hidden)
        padding = -count % ROUTER_MULTIPLE
        router = checkpoint.weight(base + "gate.weight", count, hidden)
        router = torch.cat([router, router.new_zeros(padding, hidden)]).T
        bias = checkpoint.weight(base + "gate.e_score_correction_bias", count)
        gate_up = torch.empty(count, hidden, 2 * held)
        down = torch.empty(count, held, hidden)
        for e in range(count):
            name = f"{base}experts.{e}."
            gate_up[e, :, :held] = checkpoint.expert(name + "gate_proj", width, hidden, c.int4_experts).T
            gate_up[e, :, held:] = checkpoint.expert(name + "up_proj", width, hidden, c.int4_experts).T
            down[e] = checkpoint.expert(name + "down_proj", hidden, width, c.int4_experts).T
        return cls(
            shared_router=torch.cat([shared, router], 1).contiguous(),
            shared_down=shared_down,
            bias=torch.cat([bias, bias.new_full((padding,), float("-inf"))]),
            experts=ExpertWeights.of(gate_up, down),
        )


def dense(w: DenseWeights, x: torch.Tensor, hidden: torch.Tensor | None, law: RowLaw) -> torch.Tensor:
    """hidden + MLP(x); without `hidden` this share's part of MLP(x)."""
    return linear(swiglu(wide_linear(x, w.gate_up, law)), w.down, law, hidden)


def moe(
    w: MoeWeights,
    x: torch.Tensor,
    hidden: torch.Tensor | None,
    rows: int,
    c: K2Config,
    law: RowLaw,
    routes: list[torch.Tensor],
) -> torch.Tensor:
    """hidden + routed experts + shared expert; only the first `rows` rows are routed. Without `hidden` this share's
    part of the experts' sum. What they chose is appended to `routes`."""
    a = linear(x, w.shared_router, law)
    split = a.shape[1] - w.bias.shape[0]
    route = moe_route(a[:rows, split:], w.bias, c.num_experts_per_tok, c.norm_topk_prob, c.routed_scaling_factor)
    routes.append(route.chosen)
    routed = pad_rows(int4_moe(x, route, w.experts, law), len(x))
    return linear(swiglu(a[:, :split]), w.shared_down, law, hidden).add_(routed)
