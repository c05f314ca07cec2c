"""Random batches for the attention kernels: paged caches in which every slot that holds no key is NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kernels.gpu.mla_tree_attention import Plan, Workspace, mla_tree_attention

NARROW, NARROW_2, WIDE = Plan(16, 1, 264, 64), Plan(16, 2, 132, 64), Plan(64, 2, 132, 64)
PORTABLE = Plan(16, 0, 132, 64)  # without Hopper's matrix unit
FORMS = [NARROW, NARROW_2, WIDE, PORTABLE, WIDE._replace(gluon=True)]


@dataclass(frozen=True)
class Batch:
    q: torch.Tensor  # [R, H, C+P]
    cache: torch.Tensor
    page_table: torch.Tensor
    prefix_lens: torch.Tensor
    row_start: torch.Tensor
    ancestors: torch.Tensor
    widths: torch.Tensor
    latent: int

    @property
    def starts(self) -> list[int]:
        return list(self.row_start.tolist())


def tree(rows: int, kind: str, random: torch.Generator) -> list[int]:
    """Ancestor masks of a tree of `rows` rows; of a prompt's longer chain, none."""
    if rows > 64:
        return [0] * rows
    masks: list[int] = []
    for j in range(rows):
        parent = {"chain": j - 1, "star": min(j, 1) - 1}.get(kind)
        if parent is None:
            parent = int(torch.randint(-1, j, (1,), generator=random)) if j else -1
        masks.append((masks[parent] if parent >= 0 else 0) | 1 << j)
    return masks


def signed(masks: Sequence[int]) -> torch.Tensor:
    return torch.tensor([m - (1 << 64) if m >> 63 else m for m in masks], dtype=torch.int64, device="cuda")


def ints(values: Sequence[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def batch(
    prefixes: Sequence[int],
    counts: Sequence[int],
    *,
    kind: str = "random",
    heads: int = 8,
    latent: int = 512,
    rope: int = 64,
    width: int | Sequence[int] = 128,
    padding: int = 0,
    seed: int = 0,
) -> Batch:
    """Sequence b: prefixes[b] cached tokens and counts[b] rows. Queries of padding rows are NaN."""
    random = torch.Generator().manual_seed(seed)
    device = torch.Generator("cuda").manual_seed(seed)
    total = [p + c for p, c in zip(prefixes, counts, strict=True)]
    pages = [-(-t // 64) for t in total]
    cache = torch.full((sum(pages) + 3, 64, latent + rope), float("nan"), dtype=torch.bfloat16, device="cuda")
    order = torch.randperm(len(cache), generator=random).tolist()
    table = torch.full((len(prefixes), max(pages) + 1), order[-1], dtype=torch.int32)
    for b, count in enumerate(pages):
        table[b, :count] = torch.tensor(order[:count], dtype=torch.int32)
        order = order[count:]
    table = table.cuda()
    for b, count in enumerate(total):
        slot = torch.arange(count, device="cuda")
        keys = torch.randn(count, latent + rope, device="cuda", generator=device)
        cache[table[b, slot // 64].long(), slot % 64] = keys.bfloat16()
    rows = sum(counts)
    q = torch.full((rows + padding, heads, latent + rope), float("nan"), dtype=torch.bfloat16, device="cuda")
    q[:rows] = torch.randn(rows, heads, latent + rope, device="cuda", generator=device) / 8
    masks = [mask for count in counts for mask in tree(count, kind, random)] + [(1 << 64) - 1] * padding
    widths = [width] * len(prefixes) if isinstance(width, int) else width
    starts = [sum(counts[:b]) for b in range(len(counts) + 1)]
    return Batch(q, cache, table, ints(prefixes), ints(starts), signed(masks), ints(widths), latent)


def attend(b: Batch, form: Plan | None = None, splits: int = 64) -> torch.Tensor:
    rows, heads = b.q.shape[:2]
    out = torch.full((rows, heads, b.latent), float("nan"), dtype=torch.bfloat16, device="cuda")
    if form is not None and form.columns != 64:
        form = form._replace(columns=b.latent)
    workspace = Workspace(rows, heads, b.latent, splits)
    for tensor in (workspace.sums, workspace.scalars, workspace.open_terms, workspace.open_sums):
        tensor.fill_(float("nan"))
    mla_tree_attention(
        b.q, b.cache, b.page_table, b.prefix_lens, b.row_start, b.ancestors, b.widths, out, workspace, form
    )
    return out


def decoded(b: Batch, sequence: int) -> Batch:
    """Each row of one sequence as plain decoding: a sequence of one row, its path in order in pages of its own."""
    first, end = b.starts[sequence : sequence + 2]
    prefix, width = int(b.prefix_lens[sequence]), b.q.shape[-1]
    paths = []
    for row in range(first, end):
        mask = int(b.ancestors[row]) & ((1 << 64) - 1)
        paths.append([*range(prefix), *(prefix + j for j in range(64) if mask >> j & 1)])
    pages = [-(-len(path) // 64) for path in paths]
    cache = torch.full((sum(pages) + 1, 64, width), float("nan"), dtype=torch.bfloat16, device="cuda")
    table = torch.full((len(paths), max(pages) + 1), sum(pages), dtype=torch.int32, device="cuda")
    page = 0
    for n, path in enumerate(paths):
        table[n, : pages[n]] = torch.arange(page + pages[n] - 1, page - 1, -1, device="cuda", dtype=torch.int32)
        page += pages[n]
        slot = torch.tensor(path, device="cuda")
        to = torch.arange(len(path), device="cuda")
        keys = b.cache[b.page_table[sequence, slot // 64].long(), slot % 64]
        cache[table[n, to // 64].long(), to % 64] = keys
    return replace(
        b,
        q=b.q[first:end].contiguous(),
        cache=cache,
        page_table=table,
        prefix_lens=ints([len(path) - 1 for path in paths]),
        row_start=ints(range(len(paths) + 1)),
        ancestors=signed([1] * len(paths)),
        widths=b.widths[sequence].repeat(len(paths)),
    )


def one(b: Batch, sequence: int) -> Batch:
    """That sequence alone."""
    first, end = b.starts[sequence : sequence + 2]
    part = slice(sequence, sequence + 1)
    return replace(
        b,
        q=b.q[first:end].contiguous(),
        page_table=b.page_table[part],
        prefix_lens=b.prefix_lens[part],
        row_start=ints([0, end - first]),
        ancestors=b.ancestors[first:end],
        widths=b.widths[part],
    )


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit for bit; -0 is not 0, and NaN is itself."""
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))
