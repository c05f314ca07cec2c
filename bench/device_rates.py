"""What this GPU does at best: bytes read and copied a second, matrix operations a second, a node of a graph."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

BUFFER = 2 << 30  # bytes: many times L2
SIDE = 8192  # of the matrix product


class Rates(NamedTuple):
    """Measured in this process."""

    read: float  # bytes a second that one kernel reads
    copy: float  # bytes a second, read and written counted
    matmul: float  # bf16 operations a second, after a rest
    sustained: float  # the same after half a second of work: the card's power is capped
    node: float  # us, a node of a CUDA graph that loads and stores one number a program, 132 programs

    def describe(self) -> str:
        return (
            f"{torch.cuda.get_device_name()}: read {self.read / 1e12:.2f} TB/s, copy {self.copy / 1e12:.2f} TB/s, "
            f"bf16 {self.matmul / 1e12:.0f} TFLOP/s ({self.sustained / 1e12:.0f} sustained), node {self.node:.2f} us"
        )


@triton.jit
def _read(x_ptr, out_ptr, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * STEPS * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for i in range(STEPS):
        total += tl.load(x_ptr + at + i * BLOCK)
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _copy(x_ptr, out_ptr, STEPS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * STEPS * BLOCK + tl.arange(0, BLOCK)
    for i in range(STEPS):
        tl.store(out_ptr + at + i * BLOCK, tl.load(x_ptr + at + i * BLOCK))


@triton.jit
def _nothing(x_ptr):
    at = x_ptr + tl.program_id(0)
    tl.store(at, tl.load(at) + 1)


def milliseconds(run: Callable[[], object]) -> float:
    """Device time of `run`, by events."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def graph_of(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """The calls, one after another, as a CUDA graph. All have run before, or their kernels would load inside it."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _median(run: Callable[[], object], repeats: int) -> float:
    """Seconds."""
    run()
    return statistics.median(milliseconds(run) for _ in range(repeats)) * 1e-3


def measure_rates() -> Rates:
    read, copy, node = _memory_rates()
    a, b = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out, flops = torch.empty_like(a), 2.0 * SIDE**3
    matmul = flops / _median(lambda: torch.mm(a, b, out=out), 5)
    for _ in range(350):
        torch.mm(a, b, out=out)
    return Rates(read, copy, matmul, flops / _median(lambda: torch.mm(a, b, out=out), 5), node)


def _memory_rates() -> tuple[float, float, float]:
    words, block, steps = BUFFER // 4, 4096, 4
    x = torch.randint(-(1 << 30), 1 << 30, (words,), dtype=torch.int32, device="cuda")
    y = torch.empty_like(x)
    programs = words // (block * steps)
    sums = torch.empty(programs, dtype=torch.int32, device="cuda")
    read = _median(lambda: _read[(programs,)](x, sums, STEPS=steps, BLOCK=block, num_warps=8), 7)
    copy = _median(lambda: _copy[(programs,)](x, y, STEPS=steps, BLOCK=block, num_warps=8), 7)
    empty = graph_of([lambda: _nothing[(132,)](sums)] * 1000)
    return BUFFER / read, 2 * BUFFER / copy, _median(empty.replay, 5) * 1e3
