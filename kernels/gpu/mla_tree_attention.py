"""Path D's attention: rows of draft trees (plain decoding is a tree of one row) over a paged MLA cache.

    o[r, h] = sum_j softmax_j(q[r, h] . key_j) key_j[:C]        j over the keys that row r sees

q [R, H, C+P] bf16: latent part absorbed (W_UK) | rotated part, softmax scale folded in. cache [pages, 64, C+P] bf16:
latent | rotated key. Row row_start[b] + j of sequence b stands in slot prefix_lens[b] + j; it sees all slots before the
prefix length and those of its own step whose bit is set in its `ancestors` (its own bit among them; parents before
children, so bits in ascending order are the path). out [R, H, C] bf16.

Exact: a row's bits are a function of its query, of the keys along its path and of the sequence's split width alone, so
they are the same in any tree, chain or batch, at any page layout, and equal plain decoding's.
The row at position p, with split width S: keys 0 .. p in path order, in blocks of 64, in splits of S. In a split, block
by block, m = max(m, max_j s_j log2 e) and p_j = 2^(s_j log2 e - m), what was summed before times 2^(m_old - m). The sum
of p_j is kept per key column and added over the 64 columns in fixed point. Every split but the row's last is rounded to
bf16. Splits are merged left to right under their common maximum.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton

from kernels.gpu.follow import ROOMY
from kernels.gpu.mla_launch import check, descriptors, has_wgmma
from kernels.gpu.mla_path_merge import path_merge
from kernels.gpu.mla_portable import LINES, WARPS, prefix_portable
from kernels.gpu.mla_prefix_narrow import prefix_narrow
from kernels.gpu.mla_prefix_wide import prefix_wide
from kernels.gpu.mla_reference import PAGE, tree_attention_reference
from kernels.gpu.mla_wide_cuda import prefix_wide_cuda

MOST_ROWS = 64  # of one sequence: bits of an ancestor mask
CROWD = 128  # rows; where there are more, merging programs side by side bring more than registers
LONG = 1 << 16  # tokens, a tree's rows among them: from here on sessions have twice as many splits


def split_width(limit: int) -> int:
    """Keys a split, for a session of at most `limit` tokens (prompt + max_tokens): fixed at admission, stored with it.

    The largest power of two that makes at least 32 splits, 64 where none does; of a long session the smallest that
    makes at most 128. Narrow splits keep all processors busy when one session runs alone; wide ones write fewer sums
    when many rows do. What the compromise costs either of them: docs/architecture.md.
    Raises ValueError for a limit below one.
    """
    if limit < 1:
        raise ValueError(f"limit must be at least 1, not {limit}")
    keys = limit + MOST_ROWS
    if keys >= LONG:
        return 1 << (-(-keys // 128) - 1).bit_length()
    return max(PAGE, 1 << (keys // 32).bit_length() >> 1)


def most_splits(positions: int) -> int:
    """Splits that a session may have, where a model has so many positions."""
    return 128 if positions + MOST_ROWS >= LONG else 64


class Workspace:
    """Device memory that a launch needs beside its inputs. One per stream; made before a graph is captured.

    splits: those of its longest session, `most_splits`; a power of two, at least 32.
    """

    def __init__(self, rows: int, heads: int, latent: int, splits: int, device: str = "cuda") -> None:
        self.rows, self.heads, self.latent, self.splits = rows, heads, latent, splits
        lines = rows * heads
        self.sums = torch.empty(lines, splits, latent, dtype=torch.bfloat16, device=device)
        self.scalars = torch.empty(lines, splits, 2, dtype=torch.float32, device=device)  # maximum, row sum
        self.open_terms = torch.empty(lines, PAGE, dtype=torch.float32, device=device)
        self.open_sums = torch.empty(lines, latent, dtype=torch.float32, device=device)


class Plan(NamedTuple):
    """How a launch is cut. It changes the time and never a bit."""

    lines: int  # a tile: 16 (prefix_narrow, prefix_portable) or 64 (prefix_wide)
    stages: int  # pages under way at a time, of the narrow form; 0: the portable form
    programs: int  # of the prefix kernel, at most
    columns: int  # of a merging program: 64 or C
    gluon: bool = False  # the wide form's twin in Gluon, where that in CUDA C++ is there too


def plan(rows: int, heads: int, batch: int, latent: int, pages: int, processors: int, wgmma: bool = True) -> Plan:
    """By the sizes that a CUDA graph is keyed by: rows, sequences, and the page table's width; and by the card."""
    lines = -(-rows // batch) * heads
    columns = 64 if rows * -(-heads // 8) <= processors // 4 else latent
    if not wgmma:
        return Plan(LINES, 0, processors, columns)
    if pages <= 40 and batch * -(-lines // 16) * pages <= 2 * processors:  # a page each, two programs a processor
        return Plan(16, 1, 2 * processors, columns)
    # wide tiles, where those of 16 lines would take more turns
    splits = -(-pages * PAGE // split_width(max(1, pages * PAGE - MOST_ROWS)))  # where a session fills the table
    turns = [-(-batch * -(-lines // tile) * splits // processors) for tile in (16, 64)]
    wide = lines > 16 and turns[1] < turns[0]
    return Plan(64 if wide else 16, 2, processors, columns)


def mla_tree_attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    page_table: torch.Tensor,
    prefix_lens: torch.Tensor,
    row_start: torch.Tensor,
    ancestors: torch.Tensor,
    widths: torch.Tensor,
    out: torch.Tensor,
    workspace: Workspace,
    form: Plan | None = None,
    early: bool = False,
) -> None:
    """Writes out. Everything but shapes is read on the device: no host sync, no allocation, safe in a CUDA graph.

    q [R, H, C+P] bf16, cache [pages, 64, C+P] bf16, page_table [B, n] int32 (covers slots 0 .. prefix + rows - 1 of a
    sequence; entries past that are not read), prefix_lens [B] int32, row_start [B+1] int32 (ascending from 0; 0 to 64
    rows a sequence), ancestors [R] int64, widths [B] int32 (each sequence's `split_width`), out [R, H, C] bf16.

    The step's own latents must be in the cache already (`kv_write` before this). Rows from row_start[B] to R are
    padding: whatever their q and ancestors hold, they come out as zeros. A sequence with more splits than the workspace
    has (prefix + rows > widths[b] * splits) comes out as NaN. A row with no bit set sees the prefix only; with an empty
    prefix it sees nothing and comes out as zeros. Slots that no row sees may hold anything, NaN too.
    On a CPU the reference runs. `form`: another cut of the launch than `plan`'s, for tests and benches. `early`: the
    launch before this one writes q alone, of all that is read here (kernels/gpu/follow.py).
    """
    rows, heads, _ = q.shape
    batch, latent = len(prefix_lens), out.shape[-1]
    vectors = {"ancestors": (ancestors, rows, torch.int64), "widths": (widths, batch, torch.int32)}
    check(q, cache, page_table, prefix_lens, row_start, out, **vectors)
    if rows > workspace.rows or (heads, latent) != (workspace.heads, workspace.latent):
        held = (workspace.rows, workspace.heads, workspace.latent)
        raise ValueError(f"the workspace is for {held} (rows, heads, latent), not {(rows, heads, latent)}")
    if not q.is_cuda:
        out.copy_(tree_attention_reference(q, cache, page_table, prefix_lens, row_start, ancestors, latent))
        return
    processors = torch.cuda.get_device_properties(q.device).multi_processor_count
    form = form or plan(rows, heads, batch, latent, page_table.shape[1], processors, has_wgmma(q.device))
    launch(q, cache, (page_table, prefix_lens, row_start, widths), ancestors, out, workspace, form, early)


def launch(
    q: torch.Tensor,
    cache: torch.Tensor,
    about: tuple[torch.Tensor, ...],
    ancestors: torch.Tensor,
    out: torch.Tensor,
    workspace: Workspace,
    form: Plan,
    early: bool = False,
) -> None:
    """The two kernels. `about`: page table, prefix lengths, first rows, widths."""
    rows, heads, width = q.shape
    table, batch, latent = about[0], len(about[1]), out.shape[-1]
    fixed = {"C": latent, "P": width - latent, "SPLITS": workspace.splits, "BP": triton.next_power_of_2(batch)}
    states = (workspace.sums, workspace.scalars, workspace.open_terms, workspace.open_sums)
    grid = (max(form.programs, rows * heads // form.lines + batch),)  # or as many as there can be tiles
    sizes = (batch, form.programs, heads, table.stride(0))
    if form.stages == 0:
        prefix_portable[grid](q, cache, *about, *states, *sizes, **fixed, num_warps=WARPS, launch_pdl=True)
    elif form.lines == 64:
        given = (*about, *states)
        if form.gluon or not prefix_wide_cuda(q, cache, given, latent, form.programs, workspace.splits, early):
            boxes = descriptors(q, cache, latent, form.lines)
            prefix_wide[grid](*boxes, *given, *sizes, **fixed, num_warps=8, launch_pdl=True)
    else:
        boxes = descriptors(q, cache, latent, form.lines)
        cut = {"BM": form.lines, "STAGES": form.stages, "EARLY": early}
        prefix_narrow[grid](*boxes, *about, *states, *sizes, **fixed, **cut, num_warps=4, launch_pdl=True)
    whole = form.columns == latent
    warps = 8 if whole and latent == 512 else 4
    cut = {"CT": form.columns, "W": warps, "AHEAD": 4 if whole else 16}
    programs = rows * -(-heads // 8) * (latent // form.columns)
    path_merge[(programs,)](
        q, cache, *about, ancestors, out, *states, batch, heads, table.stride(0), **fixed, **cut, num_warps=warps,
        **(ROOMY if rows <= CROWD else {}), launch_pdl=True,
    )  # fmt: skip
