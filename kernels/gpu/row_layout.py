"""Where each row of a step stands and where its keys are, from the trees themselves: nothing of it on the host.

A step's rows lie sequence by sequence. Row r of sequence q = seq[r] (negative: padding) is its row i = r - first[q]; it
holds the token after that of row parents[r] of its sequence (-1: right after the cached prefix).

    depth[r] = ancestors above it;  position[r] = prefix[q] + depth[r];  slot[r] = slot of prefix[q] + i, -1 of padding
    path[r, d] = slot of its ancestor at depth d, itself at its own depth
    shared[r]: the keys of positions below it lie at their own places in the pages, from it on along the path

A chain's positions and places run together: shared is then past the row, and no path is made; chains have any length,
trees at most 64 rows. pages [Q, P] int32, 64 slots each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.gpu.follow import follow, followed
from kernels.gpu.shapes import check

PAGE = 64
DEEPEST = 64


def reference(
    parents: list[int], seq: list[int], first: list[int], prefix: list[int], chain: list[int], pages: list[list[int]]
) -> list[tuple[int, int, int, list[int]]]:
    """(position, slot, shared, path) of each row; of padding (0, -1, 0, [])."""
    out: list[tuple[int, int, int, list[int]]] = []
    for r, q in enumerate(seq):
        if q < 0:
            out.append((0, -1, 0, []))
            continue
        node, path = r - first[q], list[int]()
        while node >= 0:
            at = prefix[q] + node
            path.insert(0, pages[q][at // PAGE] * PAGE + at % PAGE)
            node = parents[first[q] + node]
        position = prefix[q] + len(path) - 1
        shared = position + 1 if chain[q] else prefix[q]
        out.append((position, path[-1], shared, [] if chain[q] else path))
    return out


@triton.jit
def _row_layout(
    parents, seq, first, prefix, chain, pages, position, slot, shared, path,
    PAGES: tl.constexpr, DEPTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    follow(PDL)
    r = tl.program_id(0)
    q = tl.load(seq + r)
    if q < 0:
        tl.store(position + r, 0)
        tl.store(slot + r, -1)
        tl.store(shared + r, 0)
    else:
        begin, base = tl.load(first + q), tl.load(prefix + q)
        row = r - begin
        pages += q * PAGES
        at = base + row
        own = tl.load(pages + at // 64) * 64 + at % 64
        tl.store(slot + r, own)
        if tl.load(chain + q) != 0:
            tl.store(position + r, at)
            tl.store(shared + r, at + 1)
        else:
            depth = 0
            node = tl.load(parents + r)
            while node >= 0:
                depth += 1
                node = tl.load(parents + begin + node)
            tl.store(position + r, base + depth)
            tl.store(shared + r, base)
            tl.store(path + r * DEPTH + depth, own)
            node = tl.load(parents + r)
            while node >= 0:
                depth -= 1
                at = base + node
                tl.store(path + r * DEPTH + depth, tl.load(pages + at // 64) * 64 + at % 64)
                node = tl.load(parents + begin + node)


def row_layout(
    parents: torch.Tensor,
    seq: torch.Tensor,
    first: torch.Tensor,
    prefix: torch.Tensor,
    chain: torch.Tensor,
    pages: torch.Tensor,
    position: torch.Tensor,
    slot: torch.Tensor,
    shared: torch.Tensor,
    path: torch.Tensor,
) -> None:
    """Fills position, slot, shared [R] and path [R, 64], all int32. Parents come before their rows: not checked here.

    ValueError names what does not fit.
    """
    rows, sequences = parents.shape[0], pages.shape[0]
    for name, tensor in (
        ("seq", seq),
        ("position", position),
        ("slot", slot),
        ("shared", shared),
        ("parents", parents),
    ):
        check(name, tensor, (rows,), torch.int32)
    for name, tensor in (("first", first), ("prefix", prefix), ("chain", chain)):
        check(name, tensor, (sequences,), torch.int32)
    check("pages", pages, (sequences, None), torch.int32)
    check("path", path, (rows, DEEPEST), torch.int32)
    _row_layout[(rows,)](
        parents, seq, first, prefix, chain, pages, position, slot, shared, path, PAGES=pages.shape[1], DEPTH=DEEPEST,
        num_warps=1, **followed(first=True),
    )  # fmt: skip
