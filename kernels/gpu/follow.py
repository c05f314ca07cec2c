"""Programmatic dependent launch: a kernel's programs are on their processors when the one before it ends.

    @triton.jit
    def _op(..., PDL: tl.constexpr):
        follow(PDL)                             # first of all: nothing is written before

    _op[grid](..., **followed())

A kernel waits for the end of the one before it, then lets the next one be launched; an `eager` one (linear_held.py)
lets it be launched first, and says what that asks of the next. So whatever runs comes behind
everything that was launched before the kernel before it, and behind that one too once it has waited itself: results
are those of kernels one after the other. What the kernel before does not write, weights and what is older, may be read
before the wait (`early`, an argument of launchers: their caller knows what stands before them). In a graph of small
kernels the gaps between them are what this takes away; where kernels fill the device it can cost more than it brings,
and `one_after_another` turns it off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import triton
import triton.language as tl

from kernels.gpu import checks

# Of a launch that is all latency: a thread may have as many registers as there are, or the assembler, which saves them,
# has a few of its loads under way at a time and the next behind each that came. No bit depends on it.
ROOMY = {"maxnreg": 255}

_close: ContextVar[bool] = ContextVar("launched_close", default=True)


@triton.jit
def follow(PDL: tl.constexpr):
    """Waits for the kernel before, if that is still running, then lets the next one be launched."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def fetch_ahead(rows, live, WIDTH: tl.constexpr):
    """Begins to read WIDTH bfloat16 from each of these places into L2: weights, which no kernel writes, while the
    kernel before still runs."""
    line = tl.arange(0, triton.next_power_of_2(triton.cdiv(WIDTH, 64))) * 64
    at = rows[:, None] + tl.minimum(line, WIDTH - 1)[None, :]
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [at.to(tl.int64), (live[:, None] & (line < WIDTH)[None, :]).to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def followed(first: bool = False) -> dict[str, bool]:
    """Arguments of a launch. `first`: what stands before it may be a copy, which no launch can run into."""
    on = _close.get() and not checks.INTERPRETED
    return {"PDL": on, "launch_pdl": on and not first}


@contextlib.contextmanager
def one_after_another() -> Iterator[None]:
    """What is launched in the block is not launched before its turn."""
    token = _close.set(False)
    try:
        yield
    finally:
        _close.reset(token)
