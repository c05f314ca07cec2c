"""A product of up to 16 rows whose weights wait in shared memory: `linear` with its bits.

A program asks for its weights, or for the first STAGES pieces of them, before it waits for the kernel that makes x:
they come while that one runs. What is left behind the wait is to read x and one chain of MMA steps of 16 products,
ascending in k, as in linear.py. An `eager` one lets the launch behind it begin even before that wait, which so may ask
for its own weights: behind it may only stand what reads nothing early but weights and what is older than the last
launch before it that waited before it let go, for several eager ones may stand in a row.
"""

# a tuple that grows in an unrolled loop, which Gluon knows and mypy does not
# mypy: disable-error-code="assignment, var-annotated"
# ruff: noqa: RUF005
from __future__ import annotations

from typing import NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mma_v2

from kernels.gpu.follow import followed

MOST = 16  # rows, all of them one program's


class Held(NamedTuple):
    """How a product is divided among programs. No bit depends on it."""

    bn: int  # columns of a program
    warps: int
    piece: int  # of k
    stages: int  # pieces in shared memory at a time

    def shared(self, span: int) -> int:
        """Bytes of shared memory of a program, whose part of K is `span` long: its weights, and all of its x."""
        return 2 * (self.bn * self.piece * self.stages + MOST * span)


# (N, K) of a K2.6 rank at TP=8. Found on an H200, in the whole step; o (7168, 1024) is slower so, and so are 32 rows.
HELD = {
    (2112, 7168): Held(64, 8, 128, 5),  # q_a and kv_a: two programs to a processor
    (1536, 1536): Held(16, 2, 256, 6),  # q_b
    (128, 512): Held(16, 2, 256, 2),  # W_UV
    (896, 7168): Held(64, 8, 128, 7),  # shared expert's gate and up, router
    (7168, 256): Held(64, 8, 256, 1),  # its down
}


def whole_lines(x: torch.Tensor) -> bool:
    """Whether its rows [A, B, K] can be copied 16 bytes at a time."""
    return x.stride(0) % 16 == 0 and x.stride(1) % 16 == 0 and x.data_ptr() % 16 == 0


def held_for(device: torch.device, rows: int, n: int, span: int, k: int, shared: int) -> Held | None:
    """How such a product is held in `shared` bytes of a program; None where linear.py has the kernel for it."""
    if device.type != "cuda" or rows > MOST or (n, k) not in HELD:
        return None
    how = HELD[n, k]
    return how if how.shared(span) <= shared else None


@gluon.jit
def follow_eagerly(x, EAGER: gl.constexpr):
    """As `follow`; EAGER: dependents first."""
    ORDER: gl.constexpr = (
        "griddepcontrol.launch_dependents; griddepcontrol.wait;"
        if EAGER
        else "griddepcontrol.wait; griddepcontrol.launch_dependents;"
    )
    gl.inline_asm_elementwise(
        ORDER + " mov.u32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit(do_not_specialize=["count"])
def linear_held(
    x, w, out, count, x_row, x_head, out_row, out_head, out_part, scale,
    N: gl.constexpr, K: gl.constexpr, PARTS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, W: gl.constexpr, EAGER: gl.constexpr,
):  # fmt: skip
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    LANES: gl.constexpr = BK // 8 if BK < 256 else 32
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [W, 1], [1, 0])
    M: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, W], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, M, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, M, 2)
    SPAN: gl.constexpr = K // PARTS
    PIECES: gl.constexpr = SPAN // BK
    pid = gl.program_id(0)
    head = gl.program_id(1)
    part = gl.program_id(2)
    held = ()
    for _ in gl.static_range(STAGES):
        held = held + (gl.allocate_shared_memory(gl.bfloat16, [BN, BK], SHARED),)
    line = gl.arange(0, BN, gl.SliceLayout(1, WIDE))
    k = part * SPAN + gl.arange(0, BK, gl.SliceLayout(0, WIDE))
    columns = w + (head * N + pid * BN + line).to(gl.int64)[:, None] * K + k[None, :]
    for s in gl.static_range(STAGES):
        async_copy.async_copy_global_to_shared(held[s], columns + s * BK)
        async_copy.commit_group()
    row = gl.arange(0, BM, gl.SliceLayout(1, WIDE))
    rows = x + head * x_head + row.to(gl.int64)[:, None] * x_row + k[None, :]
    follow_eagerly(pid, EAGER)
    given = ()
    if STAGES >= PIECES:
        for s in gl.static_range(PIECES):
            given = given + (gl.allocate_shared_memory(gl.bfloat16, [BM, BK], SHARED),)
            async_copy.async_copy_global_to_shared(given[s], rows + s * BK, (row < count)[:, None])
        async_copy.commit_group()
        async_copy.wait_group(0)
    else:  # through registers, or what is asked for last would be waited for with the weights
        read = ()
        for s in gl.static_range(PIECES):
            read = read + (gl.load(rows + s * BK, mask=(row < count)[:, None], other=0.0),)
        for s in gl.static_range(PIECES):
            given = given + (gl.allocate_shared_memory(gl.bfloat16, [BM, BK], SHARED, read[s]),)
    acc = gl.zeros([BM, BN], gl.float32, M)
    for s in gl.static_range(PIECES):
        if STAGES < PIECES:
            async_copy.wait_group(STAGES - 1 if s + STAGES <= PIECES else PIECES - 1 - s)
        if STAGES < PIECES or s == 0:
            gl.thread_barrier()
        for c in gl.static_range(BK // 64):
            b = held[s % STAGES].slice(c * 64, 64, dim=1).permute((1, 0)).load(B)
            acc = mma_v2(given[s].slice(c * 64, 64, dim=1).load(A), b, acc)
        if s + STAGES < PIECES:
            gl.thread_barrier()
            async_copy.async_copy_global_to_shared(held[s % STAGES], columns + (s + STAGES) * BK)
            async_copy.commit_group()
    m = gl.arange(0, BM, gl.SliceLayout(1, M))
    n = pid * BN + gl.arange(0, BN, gl.SliceLayout(0, M))
    at = out + head * out_head + part * out_part + m.to(gl.int64)[:, None] * out_row + n[None, :]
    gl.store(at, (acc * scale).to(out.dtype.element_ty), mask=(m < count)[:, None])


def multiply_held(
    x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, scale: float, how: Held, eager: bool = False
) -> None:
    """x [R', H, K], w [H, N, K] -> out [P, R, H, N], in all parts of K."""
    (heads, n, k), parts = w.shape, out.shape[0]
    linear_held[(n // how.bn, heads, parts)](
        x, w, out, out.shape[1], x.stride(0), x.stride(1), out.stride(1), out.stride(2), out.stride(0), scale,
        N=n, K=k, PARTS=parts, BM=MOST, BN=how.bn, BK=how.piece, STAGES=how.stages, W=how.warps,
        EAGER=eager, num_warps=how.warps, launch_pdl=followed()["launch_pdl"],
    )  # fmt: skip
