"""Tree attention at the shapes of one rank of Kimi K2.6 (8 heads, latent 512, rope 64), and FlashMLA beside it.

Each cell twice: with the split width and form that a session of that length gets (`kernel`, the same for every batch
and tree), and with the best ones that were found for it (`kernel best`). FlashMLA (sgl-flash-mla, if it is installed)
is causal: it has no tree, so it does less. Its scheduling call, once a step, is outside.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import torch

from bench.kernel_cells import Call, Cell, Work
from kernels.gpu.mla_prefill_attention import mla_prefill_attention
from kernels.gpu.mla_reference import prefill_attention_reference, tree_attention_reference
from kernels.gpu.mla_tree_attention import Plan, Workspace, mla_tree_attention, split_width

HEADS, LATENT, ROPE = 8, 512, 64
WIDTH = LATENT + ROPE
POOL = 65536  # pages: 4.8 GB, of which every call reads others
ROOM = 1024  # tokens that a session may still grow by
# (B, L, T): the bar in us, or as a ratio to the floor; the best width and form found
CELLS: dict[tuple[int, int, int], tuple[float | None, int, Plan | None]] = {
    (1, 1024, 16): (11, 64, None),
    (1, 8192, 1): (15, 128, None),
    (1, 8192, 16): (21, 256, None),
    (1, 32768, 16): (40, 512, None),
    (8, 32768, 1): (None, 2048, None),
    (8, 32768, 8): (None, 2048, None),
    (8, 32768, 16): (None, 4096, None),
    (8, 32768, 32): (None, 8192, None),
    (8, 32768, 64): (None, 16384, None),
}


@cache
def pool() -> torch.Tensor:
    return torch.randn(POOL, 64, WIDTH, device="cuda", dtype=torch.bfloat16)


@cache
def workspace(rows: int, splits: int) -> Workspace:
    return Workspace(rows, HEADS, LATENT, splits)


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


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    error = float((got.float() - expected).norm() / expected.norm())
    assert error < 4e-3, error


def tree_cell(
    batch: int, length: int, rows: int, width: int, form: Plan | None, name: str, limit: float | None = None
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
    return Cell("mla_tree_attention", shape(batch, length, rows), need, make, need.read, name, limit)


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


def prefill_cell(length: int, rows: int) -> Cell:
    """`rows` rows behind `length` cached ones."""
    pages = -(-(length + rows) // 64)

    def make() -> Call:
        table = torch.randperm(POOL, device="cuda")[:pages].to(torch.int32).view(1, pages)
        q = torch.randn(rows, HEADS, WIDTH, device="cuda").bfloat16() / math.sqrt(192)
        lens = torch.tensor([length], dtype=torch.int32, device="cuda")
        starts = torch.tensor([0, rows], dtype=torch.int32, device="cuda")
        out = torch.empty(rows, HEADS, LATENT, dtype=torch.bfloat16, device="cuda")

        def run() -> None:
            mla_prefill_attention(q, pool(), table, lens, starts, out)

        def check() -> None:
            some = slice(rows - 64, rows)
            expected = prefill_attention_reference(
                q[some], pool(), table, lens + rows - 64, starts.clamp(max=64), LATENT
            )
            close(out[some], expected)

        return Call(run, [out], check)

    read = (length + rows) * WIDTH * 2 + rows * HEADS * WIDTH * 2
    flops = 2.0 * rows * HEADS * (WIDTH + LATENT) * (length + rows / 2)
    need = Work(read, rows * HEADS * LATENT * 2, flops)
    return Cell("mla_prefill_attention", f"L={length} rows={rows}", need, make, read, most_sets=24)


def shape(batch: int, length: int, rows: int) -> str:
    return f"B={batch} L={length} T={rows}"


def cells() -> Iterator[Cell]:
    for (batch, length, rows), (limit, width, form) in CELLS.items():
        fixed = split_width(length + ROOM)
        yield tree_cell(batch, length, rows, fixed, None, "kernel", limit)
        if width != fixed or form is not None:
            yield tree_cell(batch, length, rows, width, form, f"kernel best S={width}", limit)
        yield peer_cell(batch, length, rows)
    for length, rows in [(0, 2048), (8192, 512), (8192, 2048), (32768, 2048)]:
        yield prefill_cell(length, rows)
