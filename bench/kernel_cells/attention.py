"""Tree attention at the shapes of one rank of Kimi K2.6 (8 heads, latent 512, rope 64), and FlashMLA beside it.

Each cell twice: with the split width and form that a session of that length gets (`kernel`, the same for every batch
and tree), and with the best ones that were found for it (`kernel best`). FlashMLA (sgl-flash-mla, if it is installed)
is causal: it has no tree, so it does less; `peer FlashMLA + tail` is the same for the prefix alone, and then the tree's
rows and the merge (bench/peer_tree.py). Its scheduling call, once a step, is outside. `portable`: the form for cards
without Hopper's matrix unit, where it can be compared. `without the law`: our own loops free of what equal bits ask
(bench/fast_tree.py). `kernel in Gluon`: tiles of 64 lines where those in CUDA C++ cannot be built.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import torch

from bench.fast_tree import cut_of, fast_tree
from bench.kernel_cells import Call, Cell, Work
from bench.peer_tree import tail_merge
from bench.tree_baseline import per_head
from hedgerow.model.cuda_plan import prompt_width
from kernels.gpu.mla_reference import tree_attention_reference
from kernels.gpu.mla_tree_attention import MOST_ROWS, Plan, Workspace, mla_tree_attention, plan, split_width

HEADS, LATENT, ROPE = 8, 512, 64
WIDTH = LATENT + ROPE
POOL = 65536  # pages: 4.8 GB, of which every call reads others
PROCESSORS = 132
ROOM = 1024  # tokens that a session may still grow by
# (B, L, T): the bar, in us for one session and as a ratio to the floor for eight; the best width and form found
NARROW, WIDE, WHOLE = Plan(16, 2, 132, 64), Plan(64, 2, 132, 64), Plan(64, 2, 132, 512)
CELLS: dict[tuple[int, int, int], tuple[float | None, int, Plan | None]] = {
    (1, 1024, 16): (11, 64, None),
    (1, 8192, 1): (15, 128, Plan(16, 1, 264, 64)),
    (1, 8192, 16): (21, 128, WIDE),
    (1, 32768, 16): (40, 512, WIDE),
    (1, 32768, 32): (None, 1024, WIDE),
    (8, 32768, 1): (1.3, 2048, NARROW),
    (8, 32768, 8): (1.6, 2048, WHOLE),
    (8, 32768, 16): (1.7, 4096, WHOLE),
    (8, 32768, 32): (1.6, 8192, WHOLE),
    (8, 32768, 64): (1.55, 16384, WHOLE),
    (1, 65536, 16): (None, 1024, None),
    (1, 131072, 1): (None, 1024, None),
    (1, 131072, 8): (None, 2048, None),
    (1, 131072, 16): (None, 2048, None),
    (1, 131072, 32): (None, 4096, None),
    (1, 131072, 64): (None, 4096, None),
    (1, 261056, 16): (None, 4096, None),
    (8, 131072, 1): (None, 4096, None),
    (8, 131072, 16): (None, 4096, None),
}
PORTABLE = {(1, 8192, 1), (1, 8192, 16), (1, 32768, 16), (8, 32768, 1), (8, 32768, 16)}


@cache
def pool() -> torch.Tensor:
    return torch.randn(POOL, 64, WIDTH, device="cuda", dtype=torch.bfloat16)


@cache
def workspace(rows: int, splits: int) -> Workspace:
    return Workspace(rows, HEADS, LATENT, splits)


@cache
def floats(count: int) -> torch.Tensor:
    return torch.empty(count, device="cuda")


def masks(batch: int, rows: int) -> torch.Tensor:
    """Random trees of `rows` rows, budget rows - 1."""
    out = []
    for _ in range(batch):
        ancestors: list[int] = []
        for j in range(rows):
            parent = int(torch.randint(-1, j, (1,))) if j > 1 else j - 1
            ancestors.append((ancestors[parent] if parent >= 0 else 0) | 1 << j)
        out += [mask - (1 << 64) if mask >> 63 else mask for mask in ancestors]
    return torch.tensor(out, dtype=torch.int64, device="cuda")


def work(batch: int, length: int, rows: int) -> Work:
    lines = batch * rows * HEADS
    return Work(batch * (length + rows) * WIDTH * 2, lines * LATENT * 2, 2.0 * lines * (WIDTH + LATENT) * length)


def close(got: torch.Tensor, expected: torch.Tensor, most: float = 4e-3) -> None:
    error = float((got.float() - expected).norm() / expected.norm())
    assert error < most, error


def tree_cell(
    batch: int, length: int, rows: int, width: int, form: Plan | None, name: str, bar: float | None = None
) -> Cell:
    splits = max(32, 1 << (-(-(length + rows) // width) - 1).bit_length())
    pages = -(-(length + rows) // 64)

    def make() -> Call:
        table = torch.randperm(POOL, device="cuda")[: batch * pages].to(torch.int32).view(batch, pages)
        q = torch.randn(batch * rows, HEADS, WIDTH, device="cuda").bfloat16() / math.sqrt(192)
        lens = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * rows
        widths = torch.full_like(lens, width)
        trees, out = masks(batch, rows), torch.empty(batch * rows, HEADS, LATENT, dtype=torch.bfloat16, device="cuda")
        space = workspace(batch * rows, splits)

        def run() -> None:
            mla_tree_attention(q, pool(), table, lens, starts, trees, widths, out, space, form)

        def check() -> None:
            close(out, tree_attention_reference(q, pool(), table, lens, starts, trees, LATENT))

        return Call(run, [out], check)

    need = work(batch, length, rows)
    cell = Cell("mla_tree_attention", shape(batch, length, rows), need, make, need.read, name)
    return cell._replace(limit=bar) if batch == 1 else cell._replace(times=bar)


def fast_cell(batch: int, length: int, rows: int) -> Cell:
    """What the cell takes where bits may depend on the batch."""
    pages, cut = -(-(length + rows) // 64), cut_of(batch, rows, length)

    def make() -> Call:
        table = torch.randperm(POOL, device="cuda")[: batch * pages].to(torch.int32).view(batch, pages)
        q = torch.randn(batch * rows, HEADS, WIDTH, device="cuda").bfloat16() / math.sqrt(192)
        lens = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * rows
        trees, out = masks(batch, rows), torch.empty(batch * rows, HEADS, LATENT, dtype=torch.bfloat16, device="cuda")
        space = floats(cut.splits * batch * rows * HEADS * (LATENT + 2))

        def run() -> None:
            fast_tree(q, pool(), table, lens, trees, out, space, cut)

        def check() -> None:
            close(out, tree_attention_reference(q, pool(), table, lens, starts, trees, LATENT))

        return Call(run, [out], check)

    need = work(batch, length, rows)
    return Cell("mla_tree_attention", shape(batch, length, rows), need, make, need.read, "without the law")


def peer_cell(batch: int, length: int, rows: int) -> Cell:
    pages = -(-(length + rows) // 64)

    def make() -> Call:
        from flash_mla import flash_mla_with_kvcache, get_mla_metadata  # type: ignore[import-not-found]

        metadata = get_mla_metadata()[0]
        table = torch.randperm(POOL, device="cuda")[: batch * pages].to(torch.int32).view(batch, pages)
        q = torch.randn(batch, rows, HEADS, WIDTH, device="cuda").bfloat16()
        lens = torch.full((batch,), length + rows, dtype=torch.int32, device="cuda")
        keys = pool().view(POOL, 64, 1, WIDTH)

        def run() -> None:
            flash_mla_with_kvcache(
                q, keys, table, lens, LATENT, metadata, softmax_scale=192**-0.5, causal=True, use_legacy=True
            )

        return Call(run)

    need = work(batch, length, rows)
    return Cell("mla_tree_attention", shape(batch, length, rows), need, make, need.read, "peer FlashMLA")


def peer_tree_cell(batch: int, length: int, rows: int) -> Cell:
    """FlashMLA over the prefix, then the tree's own rows and the merge: what trees cost where a kernel has none."""
    pages = -(-(length + rows) // 64)

    def make() -> Call:
        from flash_mla import flash_mla_with_kvcache, get_mla_metadata

        metadata = get_mla_metadata()[0]
        table = torch.randperm(POOL, device="cuda")[: batch * pages].to(torch.int32).view(batch, pages)
        q = torch.randn(batch, rows, HEADS, WIDTH, device="cuda").bfloat16()
        lens = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        trees, keys, scale = masks(batch, rows), pool().view(POOL, 64, 1, WIDTH), 192**-0.5
        out = torch.empty(batch, rows, HEADS, LATENT, dtype=torch.bfloat16, device="cuda")

        def run() -> None:
            prefix, lse = flash_mla_with_kvcache(
                q, keys, table, lens, LATENT, metadata, softmax_scale=scale, causal=False, use_legacy=True
            )
            tail_merge(q, pool(), table, lens, trees, prefix, lse, out, scale)

        def check() -> None:
            starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda") * rows
            flat = q.view(batch * rows, HEADS, WIDTH).float() * scale
            close(out.view(flat.shape[0], HEADS, LATENT), tree_attention_reference(
                flat, pool(), table, lens, starts, trees, LATENT
            ))  # fmt: skip

        return Call(run, [out], check)

    need = work(batch, length, rows)
    return Cell("mla_tree_attention", shape(batch, length, rows), need, make, need.read, "peer FlashMLA + tail")


def baseline_cell(length: int, rows: int) -> Cell:
    """One session; see bench/tree_baseline.py."""
    pages = -(-(length + rows) // 64)

    def make() -> Call:
        table = torch.randperm(POOL, device="cuda")[:pages].to(torch.int32)
        q = torch.randn(rows, HEADS, WIDTH, device="cuda").bfloat16() / math.sqrt(192)
        place = torch.arange(length + rows, device="cuda")
        slots = table[place // 64].long() * 64 + place % 64
        trees = masks(1, rows)
        own = (trees[:, None] >> torch.arange(rows, device="cuda")) & 1
        sees = torch.cat([torch.ones(rows, length, device="cuda"), own], 1).to(torch.uint8)
        out = torch.empty(rows, HEADS, LATENT, dtype=torch.bfloat16, device="cuda")
        lens = torch.tensor([length], dtype=torch.int32, device="cuda")
        starts = torch.tensor([0, rows], dtype=torch.int32, device="cuda")

        def check() -> None:
            close(out, tree_attention_reference(q, pool(), table[None], lens, starts, trees, LATENT))

        return Call(lambda: per_head(q, pool(), slots, sees, out), [out], check)

    need = work(1, length, rows)
    return Cell("mla_tree_attention", shape(1, length, rows), need, make, need.read, "baseline per head", most_sets=8)


def prompt_cell(length: int, rows: int) -> Cell:
    """`rows` rows of a prompt behind `length` cached ones: chains of at most a tree's rows, one behind the other."""
    pages, chains = -(-(length + rows) // 64), rows // MOST_ROWS
    prefixes = [length + MOST_ROWS * n for n in range(chains)]

    def make() -> Call:
        table = torch.randperm(POOL, device="cuda")[:pages].to(torch.int32).repeat(chains, 1)
        q = torch.randn(rows, HEADS, WIDTH, device="cuda").bfloat16() / math.sqrt(192)
        lens = torch.tensor(prefixes, dtype=torch.int32, device="cuda")
        starts = torch.arange(chains + 1, dtype=torch.int32, device="cuda") * MOST_ROWS
        widths = torch.tensor([prompt_width(at) for at in prefixes], dtype=torch.int32, device="cuda")
        one = torch.tensor([(2 << row) - 1 for row in range(63)] + [-1], device="cuda")
        paths, out = one.repeat(chains), torch.empty(rows, HEADS, LATENT, dtype=torch.bfloat16, device="cuda")
        space = workspace(rows, 64)

        def run() -> None:
            mla_tree_attention(q, pool(), table, lens, starts, paths, widths, out, space)

        def check() -> None:
            last = slice(rows - MOST_ROWS, rows)
            given = table[:1], lens[-1:], starts[:2], one
            close(out[last], tree_attention_reference(q[last], pool(), *given, LATENT))

        return Call(run, [out], check)

    read = (length + rows) * WIDTH * 2 + rows * HEADS * WIDTH * 2
    flops = 2.0 * rows * HEADS * (WIDTH + LATENT) * (length + rows / 2)
    need = Work(read, rows * HEADS * LATENT * 2, flops)
    return Cell("mla_tree_attention", f"prompt L={length} rows={rows}", need, make, read, most_sets=24)


def shape(batch: int, length: int, rows: int) -> str:
    return f"B={batch} L={length} T={rows}"


def cells() -> Iterator[Cell]:
    for (batch, length, rows), (bar, width, form) in CELLS.items():
        fixed = split_width(length + ROOM)
        yield tree_cell(batch, length, rows, fixed, None, f"kernel S={fixed}", bar)
        if width != fixed or form is not None:
            yield tree_cell(batch, length, rows, width, form, f"kernel best S={width}", bar)
        served = plan(batch * rows, HEADS, batch, LATENT, -(-(length + rows) // 64), PROCESSORS)
        if served.lines == 64:
            yield tree_cell(batch, length, rows, fixed, served._replace(gluon=True), "kernel in Gluon")
        if (batch, length, rows) in PORTABLE:
            yield tree_cell(batch, length, rows, fixed, Plan(16, 0, 264, 64 if batch == 1 else LATENT), "portable")
        yield fast_cell(batch, length, rows)
        yield peer_cell(batch, length, rows)
        yield peer_tree_cell(batch, length, rows)
        if (batch, length, rows) == (1, 32768, 32):
            yield baseline_cell(length, rows)
    for length, rows in [(0, 2048), (8192, 512), (8192, 2048), (32768, 2048)]:
        yield prompt_cell(length, rows)
