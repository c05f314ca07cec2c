"""What stands between a K2.6 rank's products: norms, a row's keys and query, the router, the activation.

All are rows of their own. Parts of a product (`apart`) are read as the product leaves them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from bench.kernel_cells import Call, Cell, Work
from kernels.gpu import absorb, add_rmsnorm, rank_norm, rope, router, silu_mul
from kernels.gpu.checks import INTERPRETED
from kernels.gpu.linear import apart

DEVICE = "cpu" if INTERPRETED else "cuda"
HALF = torch.bfloat16
EPS = 1e-6
POSITIONS, SLOTS = 4096, 65536
SHARED = 512  # columns of the product that makes the router's logits as well, before them
HIDDEN = 7168


def floats(*shape: int, of: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(of)


def numbers(rows: int, most: int) -> torch.Tensor:
    """Distinct."""
    return torch.randperm(most, device=DEVICE)[:rows].int()


def angles(half: int) -> tuple[torch.Tensor, torch.Tensor]:
    turned = torch.rand(POSITIONS, half, device=DEVICE) * 6.28
    return turned.cos(), turned.sin()


def near(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got.float(), expected.float(), atol=3e-2, rtol=1e-2)


def cell(op: str, shape: str, read: int, written: int, make: Callable[[], Call], flops: float = 0.0) -> Cell:
    return Cell(op, shape, Work(read, written, flops), make, read + written)


def norm_cell(rows: int, hidden: int, slots: int) -> Cell:
    def make() -> Call:
        x, delta, w = floats(rows, hidden), floats(rows, hidden), floats(hidden, of=HALF)
        partials, out = floats(rows, slots, hidden) if slots else None, floats(rows, hidden, of=HALF)
        sums, normed = add_rmsnorm.reference(x, w, EPS, delta, partials)

        def run() -> None:
            add_rmsnorm.add_rmsnorm(x, w, out, EPS, delta=delta, partials=partials)

        def check() -> None:
            near(x, sums)
            near(out, normed)

        return Call(run, [out], check)

    lines = rows * hidden
    shape = f"R={rows} H={hidden}" + (f" slots={slots}" if slots else "")
    return cell("add_rmsnorm", shape, lines * 4 * (2 + slots) + hidden * 2, lines * 6, make)


def inputs_cell(rows: int, query: int, latent: int, turned: int) -> Cell:
    width, cached = query + latent + turned, latent + turned
    parts = apart(rows, width, HIDDEN)

    def make() -> Call:
        a, of_query, of_keys = floats(parts, rows, width), floats(query, of=HALF), floats(latent, of=HALF)
        position, slot, (cos, sin) = numbers(rows, POSITIONS), numbers(rows, 4 * rows), angles(turned // 2)
        cache, out = floats(4 * rows, cached, of=HALF), floats(rows, query, of=HALF)

        def run() -> None:
            rope.mla_inputs(a, of_query, of_keys, EPS, position, slot, cos, sin, cache, out)

        def check() -> None:
            keys, normed = rope.mla_inputs_reference(a.sum(0), of_query, of_keys, EPS, position, cos, sin)
            near(cache[slot.long()], keys)
            near(out, normed)

        return Call(run, [out], check)

    read = parts * rows * width * 4 + rows * (turned * 4 + 8) + (query + latent) * 2
    return cell("mla_inputs", f"R={rows} {query} + {latent} + {turned}", read, rows * width * 2, make)


def absorb_cell(rows: int, heads: int, n: int, k: int, turned: int) -> Cell:
    def make() -> Call:
        query, w = floats(rows, heads, k + turned, of=HALF), (floats(heads, n, k) / k**0.5).to(HALF)
        out, position, (cos, sin) = (
            floats(rows, heads, n + turned, of=HALF),
            numbers(rows, POSITIONS),
            angles(turned // 2),
        )

        def check() -> None:
            near(out[..., :n], torch.einsum("rhk,hnk->rhn", query[..., :k].float(), w.float()) * 0.1)
            near(out[..., n:], rope.reference(query[..., k:], position, cos, sin) * 0.1)

        return Call(lambda: absorb.absorb(query, w, position, cos, sin, out, 0.1), [out], check)

    read = heads * (n * k + rows * (k + turned)) * 2 + rows * turned * 4
    shape = f"R={rows} {heads} x {n}x{k} + {turned}"
    return cell("absorb", shape, read, rows * heads * (n + turned) * 2, make, 2.0 * rows * heads * n * k)


def route_cell(rows: int, experts: int, top_k: int) -> Cell:
    parts = apart(rows, SHARED + experts, HIDDEN)

    def make() -> Call:
        logits, bias, slot = floats(parts, rows, SHARED + experts), floats(experts), numbers(rows, SLOTS)
        chosen, weights = torch.empty(rows, top_k, dtype=torch.int32, device=DEVICE), floats(rows, top_k)
        own = logits[..., SHARED:]

        def check() -> None:
            ids, shares = router.reference(own.sum(0), bias, top_k, True, 2.5)
            same = (chosen == ids).all(1)  # sums of parts in another order may tie otherwise
            assert same.float().mean() > 0.9
            torch.testing.assert_close(weights[same], shares[same], atol=1e-4, rtol=1e-4)

        return Call(lambda: router.route(own, bias, slot, chosen, weights, True, 2.5), [chosen, weights], check)

    read = parts * rows * experts * 4 + rows * 4 + experts * 4
    return cell("route", f"R={rows} E={experts} k={top_k}", read, rows * top_k * 8, make)


def lists_cell(rows: int, experts: int, top_k: int) -> Cell:
    """For experts that are not INT4; theirs is `expert_tiles`."""

    def make() -> Call:
        chosen = torch.rand(rows, experts, device=DEVICE).argsort(-1)[:, :top_k].int().contiguous()
        pairs = torch.empty(experts, rows, dtype=torch.int32, device=DEVICE)
        counts = torch.empty(experts, dtype=torch.int32, device=DEVICE)

        def check() -> None:
            expected = router.lists_reference(chosen, experts)
            assert [row[:n].tolist() for row, n in zip(pairs, counts.tolist(), strict=True)] == expected

        return Call(lambda: router.expert_lists(chosen, pairs, counts), [pairs, counts], check)

    return cell("expert_lists", f"R={rows} E={experts} k={top_k}", rows * top_k * 4, (rows * top_k + experts) * 4, make)


def silu_cell(rows: int, width: int, behind: int) -> Cell:
    columns = 2 * width + behind
    parts = apart(rows, columns, HIDDEN)

    def make() -> Call:
        a, out = floats(parts, rows, columns), floats(rows, width, of=HALF)

        def check() -> None:
            near(out, silu_mul.reference(a.sum(0), width))

        return Call(lambda: silu_mul.silu_mul(a, out), [out], check)

    return cell("silu_mul", f"R={rows} W={width}", parts * rows * 2 * width * 4, rows * width * 2, make)


def ranks_cell(rows: int, hidden: int, count: int) -> Cell:
    def make() -> Call:
        x, parts, w = floats(rows, hidden), floats(count, rows, hidden, of=HALF), floats(hidden, of=HALF)
        out = floats(rows, hidden, of=HALF)
        sums, normed = rank_norm.reference(x, parts, w, EPS)

        def check() -> None:
            near(x, sums)
            near(out, normed)

        return Call(lambda: rank_norm.rank_norm(x, parts, w, out, EPS), [out], check)

    lines = rows * hidden
    shape = f"R={rows} H={hidden} ranks={count}"
    return cell("rank_norm", shape, lines * (4 + 2 * count) + hidden * 2, lines * 6, make)


OPS: list[tuple[Sequence[tuple[int, ...]], Callable[..., Cell]]] = [
    (add_rmsnorm.BENCH_SHAPES, norm_cell), (rope.BENCH_SHAPES, inputs_cell), (absorb.BENCH_SHAPES, absorb_cell),
    (router.BENCH_SHAPES, route_cell), (router.BENCH_SHAPES, lists_cell), (silu_mul.BENCH_SHAPES, silu_cell),
    (rank_norm.BENCH_SHAPES, ranks_cell),
]  # fmt: skip


def cells() -> Iterator[Cell]:
    for shapes, make in OPS:
        for shape in shapes:
            yield make(*shape)
