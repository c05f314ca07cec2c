"""A gated activation and the product behind it, in one launch, for a single row.

    y = g / (1 + exp(-g)) * u, rounded once;   out[n] = sum_k y[k] w[n, k]          [g | u | ...] = the sum of parts

Bits are those of `silu_mul` and `linear`: every program activates the whole row, which is short. Weights wait in shared
memory, as in linear_held.py. parts [P, 1, >= 2 K] float32, w [N, K] -> out [1, N].
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mma_v2

from kernels.gpu.follow import followed
from kernels.gpu.linear_held import follow_eagerly
from kernels.gpu.shapes import check

ACTIVATED = {(7168, 256): 64}  # (N, K) of a K2.6 rank at TP=8, the shared expert's down: columns of a program
WARPS = 8


@gluon.jit
def _joined(parts, at, part, PARTS: gl.constexpr):
    acc = gl.load(parts + at)
    for p in gl.static_range(1, PARTS):
        acc += gl.load(parts + p * part + at)
    return acc


@gluon.jit
def linear_activated(
    parts, w, out, part,
    K: gl.constexpr, PARTS: gl.constexpr, BN: gl.constexpr, W: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [W, 1], [1, 0])
    ROW: gl.constexpr = gl.BlockedLayout([K // (32 * W)], [32], [W], [0])
    M: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, W], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, M, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, M, 2)
    pid = gl.program_id(0)
    held = gl.allocate_shared_memory(gl.bfloat16, [BN, K], SHARED)
    line = pid * BN + gl.arange(0, BN, gl.SliceLayout(1, WIDE))
    columns = w + line.to(gl.int64)[:, None] * K + gl.arange(0, K, gl.SliceLayout(0, WIDE))[None, :]
    async_copy.async_copy_global_to_shared(held, columns)
    async_copy.commit_group()
    i = gl.arange(0, K, ROW)
    if not EARLY:
        follow_eagerly(pid, False)
    gate = _joined(parts, i, part, PARTS)
    up = _joined(parts, K + i, part, PARTS)
    y = gate / (1.0 + gl.exp(-gate)) * up
    given = gl.allocate_shared_memory(gl.bfloat16, [K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    given.store(y.to(gl.bfloat16))
    async_copy.wait_group(0)
    gl.thread_barrier()
    acc = gl.zeros([16, BN], gl.float32, M)  # sixteen times the same row
    for c in gl.static_range(K // 64):
        a = gl.expand_dims(given.slice(c * 64, 64).load(gl.SliceLayout(0, A)), 0).broadcast_to((16, 64))
        acc = mma_v2(a, held.slice(c * 64, 64, dim=1).permute((1, 0)).load(B), acc)
    if EARLY:
        follow_eagerly(pid, False)
    m = gl.arange(0, 16, gl.SliceLayout(1, M))
    n = pid * BN + gl.arange(0, BN, gl.SliceLayout(0, M))
    gl.store(out + m[:, None] + n[None, :], acc.to(out.dtype.element_ty), mask=(m < 1)[:, None])


def activated_for(w: torch.Tensor, rows: int) -> bool:
    """Whether there is this form for a product with w."""
    known = (w.shape[0], w.shape[1]) in ACTIVATED
    return known and rows == 1 and w.device.type == "cuda" and w.dtype == torch.bfloat16


def multiply_activated(parts: torch.Tensor, w: torch.Tensor, out: torch.Tensor, early: bool = False) -> torch.Tensor:
    """Fills out. `early`: the launch before this one does not make the parts (follow.py).

    ValueError names what does not fit, and a product that has no such form.
    """
    n, k = w.shape
    if (n, k) not in ACTIVATED:
        raise ValueError(f"w is [{n}, {k}], one of {list(ACTIVATED)} was expected")
    check("w", w, (n, k), torch.bfloat16)
    check("out", out, (1, n))
    if parts.dim() != 3 or parts.shape[1] != 1 or parts.shape[2] < 2 * k or parts.stride(2) != 1:
        raise ValueError(f"parts are {list(parts.shape)}, [any, 1, at least {2 * k}] with whole rows was expected")
    if parts.dtype != torch.float32:
        raise ValueError(f"parts are {parts.dtype}, float32 was expected")
    columns = ACTIVATED[n, k]
    linear_activated[(n // columns,)](
        parts, w, out, parts.stride(0), K=k, PARTS=len(parts), BN=columns, W=WARPS, EARLY=early, num_warps=WARPS,
        launch_pdl=followed()["launch_pdl"],
    )  # fmt: skip
    return out
