"""Compiles a K2.6 rank's dense products as they are cut, and what stands between them:
python -m tests.gpu_compile_linear 90"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch

from kernels.gpu.absorb import absorb
from kernels.gpu.add_rmsnorm import add_rmsnorm
from kernels.gpu.linear import CUTS, apart, cut_of, multiply, parts_of
from kernels.gpu.linear_activated import ACTIVATED, multiply_activated
from kernels.gpu.linear_held import HELD, MOST, multiply_held
from kernels.gpu.linear_normed import NORMED, linear_parts_normed, shared_by
from kernels.gpu.rope import mla_inputs
from kernels.gpu.route_silu import route_silu
from kernels.gpu.router import route
from kernels.gpu.silu_mul import silu_mul
from tests.gpu_compile import NOT_READ, SHARED, Compiled, Launch, kernel_of, launches, on_tensor_cores, read
from tests.gpu_ptx import squares

HEADS = {(512, 128): 8, (128, 512): 8}


def served(run: Callable[[], object]) -> Launch:
    """The launch, behind the kernel before it."""
    (launch,) = launches(run)
    if "PDL" in launch.function.arg_names:
        launch.arguments["PDL"] = True
    launch.options["launch_pdl"] = True
    return launch


def built(run: Callable[[], object], what: str, capability: int) -> Compiled:
    """As it is served."""
    got = read(kernel_of(served(run), capability), capability)
    assert got.spilled == 0, f"{what}: {got}"
    assert got.shared <= SHARED[capability], f"{what}: {got}"
    waits = (got.instructions["ACQBULK"], got.instructions["PREEXIT"])
    assert capability in NOT_READ or waits == (1, 1), f"{what}: {got}"
    print(f"{what}: {got.registers} registers, {got.shared} bytes shared")
    return got


def product(rows: int, n: int, k: int, capability: int) -> None:
    heads = HEADS.get((n, k), 1)
    x, w = torch.empty(rows, heads, k, dtype=torch.bfloat16), torch.empty(heads, n, k, dtype=torch.bfloat16)
    out, cut = torch.empty(apart(rows, n, k), rows, heads, n), cut_of(rows, n, k, SHARED[capability] - 4096)
    got = built(lambda: multiply(x, w, out, cut=cut), f"{n}x{k}, {rows} rows", capability)
    assert on_tensor_cores(got), f"{n}x{k}: {got}"


def held(n: int, k: int, capability: int) -> None:
    """Where the card's programs have the memory, its weights are on their way before the wait."""
    heads, how = HEADS.get((n, k), 1), HELD[n, k]
    if how.shared(k // parts_of(n, k)) > SHARED[capability] - 4096:
        print(f"{n}x{k}: not held")
        return
    x, w = torch.empty(MOST, heads, k, dtype=torch.bfloat16), torch.empty(heads, n, k, dtype=torch.bfloat16)
    out = torch.empty(parts_of(n, k), MOST, heads, n)
    got = built(lambda: multiply_held(x, w, out, 1.0, how, True), f"{n}x{k}, held", capability)
    assert got.instructions["HMMA"] == k // parts_of(n, k) // 16, f"{n}x{k}: {got}"


def normed(n: int, k: int, capability: int) -> None:
    """Its sum of squares is that of `add_rmsnorm`: the same lanes, each with the same chain, added the same way."""
    how = NORMED[n, k]
    if shared_by(how) > SHARED[capability] - 4096:
        print(f"{n}x{k}: not normed")
        return
    x, delta, into, tap = (torch.empty(1, k) for _ in range(4))
    w, norm, kept = (torch.empty(*shape, dtype=torch.bfloat16) for shape in ((n, k), (k,), (1, k)))
    room = torch.empty(parts_of(n, k) * n)

    def run() -> None:
        linear_parts_normed(x, delta, norm, w, room, into, 1e-6, how, kept=kept, tap=tap)

    got = built(run, f"{n}x{k}, normed", capability)
    products = k // parts_of(n, k) // 16 * (how.bn // 8 // how.warps)
    assert got.instructions["HMMA"] == products, f"{n}x{k}: {got}"
    whole = served(lambda: add_rmsnorm(x, norm, kept, 1e-6, delta=delta, early=True))
    if capability // 10 == 10:
        return  # pairs of float32 in one register: `squares` does not read them
    one, other = (kernel_of(launch, capability).asm["ptx"] for launch in (whole, served(run)))
    assert squares(one) == squares(other), f"{n}x{k}: {squares(one)} {squares(other)}"


def between(rows: int, capability: int) -> int:
    """What a layer has besides products; how many."""

    def room(*shape: int, of: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(*shape, dtype=of)

    floats, parts = torch.float32, apart(rows, 2112, 7168)
    whole, cos = room(rows, of=torch.int32), room(100, 32, of=floats)
    x, delta, normed = room(rows, 7168, of=floats), room(rows, 7168, of=floats), room(rows, 7168)
    a, latent = room(parts, rows, 2112, of=floats), room(rows, 1536)
    query, q = room(rows, 8, 192), room(rows, 8, 576)
    gate_up, act, weights = room(parts, rows, 896, of=floats), room(rows, 256), room(rows, 8, of=floats)
    routed = gate_up[..., 512:], room(384, of=floats), whole, room(rows, 8, of=torch.int32), weights, True, 2.5
    runs: dict[str, Callable[[], object]] = {
        "add + norm": lambda: add_rmsnorm(x, room(7168), normed, 1e-6, delta=delta, early=True, eager=True),
        "inputs": lambda: mla_inputs(
            a, room(1536), room(512), 1e-6, whole, whole, cos, cos, room(128, 576), latent, early=True
        ),
        "absorb": lambda: absorb(query, room(8, 512, 128), whole, cos, cos, q, 0.1, early=True),
        "silu": lambda: silu_mul(gate_up, act),
        "route": lambda: route(*routed),
        "route + silu": lambda: route_silu(*routed, gate_up, act),
    }  # fmt: skip
    for what, run in runs.items():
        built(run, f"{what}, {rows} rows", capability)
    return len(runs)


if __name__ == "__main__":
    capability, others = int(sys.argv[1]), 0
    for rows in (16, 64):
        for n, k in CUTS:
            product(rows, n, k, capability)
        others += between(rows, capability)
    for n, k in HELD:
        held(n, k, capability)
    for n, k in ACTIVATED:
        made, w, out = torch.empty(8, 1, 896), torch.empty(n, k, dtype=torch.bfloat16), torch.empty(1, n)
        for early in (False, True):
            got = built(partial(multiply_activated, made, w, out, early), f"{n}x{k}, activated", capability)
            assert got.instructions["HMMA"] == k // 16, got
    for n, k in NORMED:
        normed(n, k, capability)
    print(f"{2 * len(CUTS)} products, {others} others")
