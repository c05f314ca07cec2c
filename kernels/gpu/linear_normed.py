"""The end of a block and the product behind it, in one launch, for a single row.

    x' = x + delta;   y = x' rsqrt(mean(x'^2) + eps) norm, rounded once;   out[p, n] = sum_k y[k] w[n, k], k in part p

Bits are those of `add_rmsnorm` and `linear_parts`: every program sums the whole row's squares itself, by the lanes and
in the order of that kernel, norms its own part of K and multiplies as linear_held.py does. So nothing waits for a row
that one program norms alone. What all programs read grows with the rows, which is why this is for one of them.

x [1, H] float32 is read before the wait and must be older than the launch before; x' goes to `into`, another buffer,
as other programs still read x. w [N, H], norm [H] -> out [P, 1, N] float32. `kept` [1, H] gets y, `tap` [1, H] x'.
"""

# a tuple that grows in an unrolled loop, which Gluon knows and mypy does not
# mypy: disable-error-code="assignment, var-annotated"
# ruff: noqa: RUF005
from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mma_v2

from kernels.gpu.follow import ROOMY, followed
from kernels.gpu.linear import apart, shared_memory
from kernels.gpu.linear_held import Held, follow_eagerly
from kernels.gpu.shapes import check, check_rows

# (N, K) of a K2.6 rank at TP=8
NORMED = {
    (2112, 7168): Held(64, 4, 128, 6),  # q_a and kv_a: two programs to a processor
    (896, 7168): Held(64, 4, 128, 7),  # shared expert's gate and up, router
}


@gluon.constexpr_function
def _whole_row(size, warps):
    """[size] as four warps of `_add_rmsnorm` hold it, eight neighbours a lane; the next four warps hold it again."""
    reg = [[1], [2], [4], *([1024 << i] for i in range((size // 1024).bit_length() - 1))]
    again = [[0]] * (warps.bit_length() - 3)
    return gl.DistributedLinearLayout(
        reg, [[8 << i] for i in range(5)], [[256], [512], *again], [], [size]
    )  # fmt: skip


@gluon.jit
def linear_normed(
    x, delta, norm, w, out, into, kept, tap, eps,
    N: gl.constexpr, K: gl.constexpr, PARTS: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    W: gl.constexpr, ROW: gl.constexpr, KEEP: gl.constexpr, TAP: gl.constexpr,
):  # fmt: skip
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (BK // 8), BK // 8], [W, 1], [1, 0])
    M: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, W], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, M, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, M, 2)
    ALL: gl.constexpr = _whole_row(ROW, W)
    MINE: gl.constexpr = gl.BlockedLayout([1024 // (32 * W)], [32], [W], [0])
    SPAN: gl.constexpr = K // PARTS
    PIECES: gl.constexpr = SPAN // BK
    pid = gl.program_id(0)
    part = gl.program_id(1)
    held = ()
    for _ in gl.static_range(STAGES):
        held = held + (gl.allocate_shared_memory(gl.bfloat16, [BN, BK], SHARED),)
    line = gl.arange(0, BN, gl.SliceLayout(1, WIDE))
    k = part * SPAN + gl.arange(0, BK, gl.SliceLayout(0, WIDE))
    columns = w + (pid * BN + line).to(gl.int64)[:, None] * K + k[None, :]
    for s in gl.static_range(STAGES):
        async_copy.async_copy_global_to_shared(held[s], columns + s * BK)
        async_copy.commit_group()
    i = gl.arange(0, ROW, ALL)
    live = i < K
    own = gl.arange(0, 1024, MINE)
    mine = own < SPAN
    own += part * SPAN
    v = gl.load(x + i, mask=live, other=0.0)
    z = gl.load(x + own, mask=mine, other=0.0)
    factor = gl.load(norm + own, mask=mine, other=0.0)
    follow_eagerly(pid, True)
    v += gl.load(delta + i, mask=live, other=0.0)
    z += gl.load(delta + own, mask=mine, other=0.0)
    y = (z * gl.rsqrt(gl.sum(v * v, 0) / K + eps) * factor.to(gl.float32)).to(gl.bfloat16)
    given = gl.allocate_shared_memory(gl.bfloat16, [1024], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    given.store(y)
    if pid == 0:
        gl.store(into + own, z, mask=mine)
        if TAP:
            gl.store(tap + own, z, mask=mine)
        if KEEP:
            gl.store(kept + own, y, mask=mine)
    acc = gl.zeros([16, BN], gl.float32, M)  # sixteen times the same row
    for s in gl.static_range(PIECES):
        async_copy.wait_group(STAGES - 1 if s + STAGES <= PIECES else PIECES - 1 - s)
        gl.thread_barrier()
        for c in gl.static_range(BK // 64):
            a = gl.expand_dims(given.slice(s * BK + c * 64, 64).load(gl.SliceLayout(0, A)), 0).broadcast_to((16, 64))
            b = held[s % STAGES].slice(c * 64, 64, dim=1).permute((1, 0)).load(B)
            acc = mma_v2(a, b, acc)
        if s + STAGES < PIECES:
            gl.thread_barrier()
            async_copy.async_copy_global_to_shared(held[s % STAGES], columns + (s + STAGES) * BK)
            async_copy.commit_group()
    m = gl.arange(0, 16, gl.SliceLayout(1, M))
    n = pid * BN + gl.arange(0, BN, gl.SliceLayout(0, M))
    at = out + part * N + m[:, None] + n[None, :]
    gl.store(at, acc, mask=(m < 1)[:, None])


def normed_for(w: torch.Tensor, rows: int) -> Held | None:
    """How a product with w is divided, where there is this form for it and a program has the memory; or None."""
    how = NORMED.get((w.shape[0], w.shape[1]))
    if how is None or rows != 1 or w.device.type != "cuda" or w.dtype != torch.bfloat16:
        return None
    return how if shared_by(how) <= shared_memory(w.device) else None


def shared_by(how: Held) -> int:
    """Bytes of shared memory of a program: weights, and its part of y."""
    return 2 * (how.bn * how.piece * how.stages + 1024)


def linear_parts_normed(
    x: torch.Tensor,
    delta: torch.Tensor,
    norm: torch.Tensor,
    w: torch.Tensor,
    room: torch.Tensor,
    into: torch.Tensor,
    eps: float,
    how: Held | None = None,
    *,
    kept: torch.Tensor | None = None,
    tap: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product in parts [P, 1, N] float32, in the memory of `room`, as `linear_parts` leaves them; fills `into`,
    `kept` and `tap`. The next launch may begin before this one's turn (linear_held.py says what it must not do).

    ValueError names what does not fit, and a product that has no such form.
    """
    n, k = w.shape
    for name, row in (("x", x), ("delta", delta), ("into", into)):
        check(name, row, (1, k), torch.float32)
    how = how or normed_for(w, len(x))
    if how is None:
        raise ValueError(
            f"w is [{n}, {k}] of {w.dtype} on {w.device}, one of {list(NORMED)} on a card with the "
            "shared memory for it was expected"
        )
    if x.data_ptr() == into.data_ptr():
        raise ValueError("into is x, another buffer was expected")
    check("w", w, (n, k), torch.bfloat16)
    check("norm", norm, (k,), w.dtype)
    if kept is not None:
        check("kept", kept, (1, k), w.dtype)
    if tap is not None:
        check_rows("tap", tap, k)
    parts = apart(1, n, k)
    if room.numel() < parts * n or room.dtype != torch.float32:
        raise ValueError(f"room is {room.numel()} of {room.dtype}, {parts * n} float32 were expected")
    out = room.view(-1)[: parts * n].view(parts, 1, n)
    linear_normed[(n // how.bn, parts)](
        x, delta, norm, w, out, into, x if kept is None else kept, x if tap is None else tap, eps,
        N=n, K=k, PARTS=parts, BN=how.bn, BK=how.piece, STAGES=how.stages, W=how.warps,
        ROW=triton.next_power_of_2(k), KEEP=kept is not None, TAP=tap is not None, num_warps=how.warps,
        **ROOMY, launch_pdl=followed()["launch_pdl"],
    )  # fmt: skip
    return out
