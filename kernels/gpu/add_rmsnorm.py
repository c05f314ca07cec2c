"""The residual stream between two blocks: what the last block gave is added, the next one's input is normed.

    x[r] += delta[r] + sum_j partial[r, j]        j ascending; either may be absent
    y[r] = x[r] * rsqrt(mean(x[r]^2) + eps) * w   rounded once

x [R, H] float32 in place, or begun as table[tokens[r]]; delta [R, H], partials [R, J, H] float32 (a slot each of the
routed experts), w [H] -> y [R, H]. `tap` [R, H], a part of wider rows, gets x as the next block finds it.
One program a row: a row's bits depend on that row alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.follow import ROOMY, follow, followed
from kernels.gpu.shapes import check, check_rows

TEST_SHAPES = [(1, 32, 0), (5, 96, 2), (9, 384, 4)]  # (R, H, J)
BENCH_SHAPES = [(1, 7168, 0), (16, 7168, 0), (64, 7168, 0), (64, 7168, 8)]


def reference(
    x: torch.Tensor, w: torch.Tensor, eps: float, delta: torch.Tensor | None, partials: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new x, and y in float32."""
    x = x.float()
    if delta is not None:
        x = x + delta.float()
    if partials is not None:
        x = x + partials.sum(1)
    return x, x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w.float()


@triton.jit
def _store(at, value, live):
    """tl.store of fours that are all live or none. As tl.store the lanes would first exchange what they hold, through
    shared memory, for wider lines: of the one row of a program that takes longer than it saves."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.ne.b32 p, $12, 0;
        @p st.global.v4.b32 [$4], {$8, $9, $10, $11};
        mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0;
        }""",
        "=r,=r,=r,=r,l,l,l,l,r,r,r,r,r,r,r,r",
        [at.to(tl.int64), value.to(tl.int32, bitcast=True), live.to(tl.int32)],
        dtype=tl.int32, is_pure=False, pack=4,
    )  # fmt: skip


@triton.jit
def _add_rmsnorm(
    x, tokens, table, delta, partials, w, out, tap, tap_row, eps,
    H: tl.constexpr, SLOTS: tl.constexpr, EMBED: tl.constexpr, DELTA: tl.constexpr, NORM: tl.constexpr,
    TAP: tl.constexpr, EARLY: tl.constexpr, EAGER: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    live = i < H
    if EAGER and PDL:
        tl.extra.cuda.gdc_launch_dependents()
    elif not EARLY:
        follow(PDL)
    if NORM:  # asked for with the rest: behind the sum it would be waited for once more
        factor = tl.load(w + i, mask=live, other=0.0)
    if EMBED:
        v = tl.load(table + tl.load(tokens + r).to(tl.int64) * H + i, mask=live, other=0.0).to(tl.float32)
    else:
        v = tl.load(x + r * H + i, mask=live, other=0.0)
    if EAGER and PDL:
        tl.extra.cuda.gdc_wait()
    elif EARLY:
        follow(PDL)
    if DELTA:
        v += tl.load(delta + r * H + i, mask=live, other=0.0).to(tl.float32)
    if SLOTS:
        routed = tl.zeros((BLOCK,), tl.float32)
        for j in tl.static_range(SLOTS):
            routed += tl.load(partials + (r * SLOTS + j) * H + i, mask=live, other=0.0)
        v += routed
    if EMBED or DELTA or SLOTS:
        if PDL and H % 4 == 0 and BLOCK >= 512:  # four neighbours or more in each of 128 lanes
            _store(x + r * H + i, v, live)
        else:
            tl.store(x + r * H + i, v, mask=live)
    if TAP:
        tl.store(tap + r * tap_row + i, v, mask=live)
    if NORM:
        scale = tl.rsqrt(tl.sum(v * v, 0) / H + eps)
        y = v * scale * factor.to(tl.float32)
        tl.store(out + r * H + i, y.to(out.dtype.element_ty), mask=live)


def add_rmsnorm(
    x: torch.Tensor,
    w: torch.Tensor | None,
    out: torch.Tensor | None,
    eps: float,
    *,
    delta: torch.Tensor | None = None,
    partials: torch.Tensor | None = None,
    tap: torch.Tensor | None = None,
    tokens: torch.Tensor | None = None,
    table: torch.Tensor | None = None,
    early: bool = False,
    eager: bool = False,
) -> None:
    """Fills `out`, or only adds where it is None. tokens int32 [R] within the table: not checked here.

    `early`: the launch before this one writes neither x nor w (follow.py). `eager`, with early: the next launch may
    begin before this one's turn (linear_held.py says what it must not do).

    ValueError names what does not fit.
    """
    rows, hidden = x.shape
    check("x", x, (rows, hidden), torch.float32)
    if delta is not None:
        check("delta", delta, (rows, hidden))
    if partials is not None:
        check("partials", partials, (rows, None, hidden), torch.float32)
    if tap is not None:
        check_rows("tap", tap, hidden)
    if tokens is not None and table is not None:
        check("tokens", tokens, (rows,), torch.int32)
        check("table", table, (None, hidden))
    if out is not None and w is not None:
        check("out", out, (rows, hidden))
        check("w", w, (hidden,))
    _add_rmsnorm[(rows,)](
        x, x if tokens is None else tokens, x if table is None else table, x if delta is None else delta,
        x if partials is None else partials, x if w is None else w, x if out is None else out,
        x if tap is None else tap, 0 if tap is None else tap.stride(0), eps,
        H=hidden, SLOTS=0 if partials is None else partials.shape[1], EMBED=table is not None, DELTA=delta is not None,
        NORM=out is not None, TAP=tap is not None, EARLY=early, EAGER=early and eager,
        BLOCK=triton.next_power_of_2(hidden), num_warps=4,
        **ROOMY, **followed(first=tokens is not None),
    )  # fmt: skip
