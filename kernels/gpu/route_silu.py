"""The routing, and beside it in the same launch the shared expert's activation: `route` and `silu_mul` with their bits.

Both read a product [shared gate | shared up | router's logits], and neither needs the other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.follow import ROOMY, follow, followed
from kernels.gpu.router import check_route, choose_row
from kernels.gpu.silu_mul import activate, check_silu

BLOCK = 256


@triton.jit
def _route_silu(
    logits, bias, slot, chosen, weights, row_stride, part_stride, scale, a, out, a_row, a_part,
    PARTS: tl.constexpr, E: tl.constexpr, K: tl.constexpr, NORMALISE: tl.constexpr, EB: tl.constexpr, KB: tl.constexpr,
    A_PARTS: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    follow(PDL)
    r = tl.program_id(0)
    if tl.program_id(1) == 0:
        choose_row(
            logits, bias, slot, chosen, weights, r, row_stride, part_stride, scale, PARTS, E, K, NORMALISE, EB, KB
        )
    else:
        row = r.to(tl.int64)
        i = (tl.program_id(1) - 1) * BLOCK + tl.arange(0, BLOCK)
        y = activate(a + row * a_row, i, i < W, a_part, A_PARTS, W)
        tl.store(out + row * W + i, y.to(out.dtype.element_ty), mask=i < W)


def route_silu(
    logits: torch.Tensor,
    bias: torch.Tensor,
    slot: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    normalise: bool,
    scale: float,
    a: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """`route` of the first seven, `silu_mul` of the others. ValueError names what does not fit."""
    logits = check_route(logits, bias, slot, chosen, weights)
    a = check_silu(a, out)
    (rows, top_k), experts, width = chosen.shape, bias.shape[0], out.shape[1]
    _route_silu[(rows, 1 + triton.cdiv(width, BLOCK))](
        logits, bias, slot, chosen, weights, logits.stride(1), logits.stride(0), scale, a, out, a.stride(1),
        a.stride(0), PARTS=logits.shape[0], E=experts, K=top_k, NORMALISE=normalise,
        EB=triton.next_power_of_2(experts), KB=triton.next_power_of_2(top_k), A_PARTS=a.shape[0], W=width, BLOCK=BLOCK,
        num_warps=1, **ROOMY, **followed(),
    )  # fmt: skip
