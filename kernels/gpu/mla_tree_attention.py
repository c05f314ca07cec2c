"""Path D's attention: rows of draft trees (plain decoding is a tree of one row) over a paged MLA cache.

    o[r, h] = sum_j softmax_j(q[r, h] . key_j) key_j[:C]        j over the keys that row r sees

q [R, H, C+P] bf16: latent part absorbed (W_UK) | rotated part, softmax scale folded in. cache [pages, 64, C+P] bf16:
latent | rotated key. Row row_start[b] + j of sequence b stands in slot prefix_lens[b] + j; it sees all slots before the
prefix length and those of its own step whose bit is set in its `ancestors` (its own bit among them; parents before
children, so bits in ascending order are the path). out [R, H, C] bf16.

Exact: a row's bits are a function of its query, of the keys along its path and of the sequence's split width alone, so
they are the same in any tree, chain or batch, at any page layout, and equal plain decoding's.
The row at position p, with split width S: keys 0 .. p in path order, in blocks of 64, in splits of S. In a split, block
by block, m = max(m, max_j s_j log2 e) and p_j = 2^(s_j log2 e - m), what was summed before times 2^(m_old - m). Splits
are merged left to right under their common maximum.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton

from kernels.gpu.mla_launch import check, descriptors
from kernels.gpu.mla_path_merge import path_merge
from kernels.gpu.mla_prefix_narrow import prefix_narrow
from kernels.gpu.mla_prefix_wide import prefix_wide
from kernels.gpu.mla_reference import PAGE, tree_attention_reference

MOST_ROWS = 64  # of one sequence: bits of an ancestor mask
MOST_SPLITS = 32
NARROWEST = 128


def split_width(limit: int) -> int:
    """Keys a split, for a session of at most `limit` tokens (prompt + max_tokens): fixed at admission, stored with it.

    A power of two, at least 128, that makes at most MOST_SPLITS splits. Raises ValueError for a limit below one.
    """
    if limit < 1:
        raise ValueError(f"limit must be at least 1, not {limit}")
    return max(NARROWEST, 1 << (-(-limit // MOST_SPLITS) - 1).bit_length())


class Workspace:
    """Device memory that a launch needs beside its inputs. One per stream; made before a graph is captured."""

    def __init__(self, rows: int, heads: int, latent: int, splits: int = MOST_SPLITS, device: str = "cuda") -> None:
        self.rows, self.heads, self.latent, self.splits = rows, heads, latent, splits
        lines = rows * heads
        self.sums = torch.empty(lines, splits, latent, dtype=torch.float32, device=device)
        self.scalars = torch.empty(lines, splits, 2, dtype=torch.float32, device=device)  # maximum, row sum
        self.open_sums = torch.empty(lines, PAGE, dtype=torch.float32, device=device)


class Plan(NamedTuple):
    """How a launch is cut. It changes the time and never a bit."""

    lines: int  # a tile: 16 or 32 (prefix_narrow), 64 (prefix_wide)
    stages: int  # pages under way at a time, of the narrow form
    programs: int  # of the prefix kernel, at most
    columns: int  # of a merging program: 64 or C


def plan(rows: int, heads: int, batch: int, latent: int, pages: int, processors: int) -> Plan:
    """By the sizes that a CUDA graph is keyed by: rows, sequences, and the page table's width."""
    lines = -(-rows // batch) * heads
    columns = 64 if rows * heads <= 264 else latent
    if lines <= 16:
        one_page_each = pages * batch <= 2 * processors
        return Plan(16, 1, 2 * processors, columns) if one_page_each else Plan(16, 2, processors, columns)
    if lines <= 32:
        return Plan(32, 2, processors, columns)
    return Plan(64, 2, processors, columns)


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


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
) -> None:
    """Writes out. Everything but shapes is read on the device: no host sync, no allocation, safe in a CUDA graph.

    q [R, H, C+P] bf16, cache [pages, 64, C+P] bf16, page_table [B, n] int32 (covers slots 0 .. prefix + rows - 1 of a
    sequence; entries past that are not read), prefix_lens [B] int32, row_start [B+1] int32 (ascending from 0; 0 to 64
    rows a sequence), ancestors [R] int64, widths [B] int32 (each sequence's `split_width`), out [R, H, C] bf16.

    The step's own latents must be in the cache already (`kv_write` before this). Rows from row_start[B] to R are
    padding: whatever their q and ancestors hold, they come out as zeros. A sequence with more splits than the workspace
    has (prefix + rows > widths[b] * splits) comes out as NaN. A row with no bit set sees the prefix only; with an empty
    prefix it sees nothing and comes out as zeros. Slots that no row sees may hold anything, NaN too.
    On a CPU the reference runs. `form`: another cut of the launch than `plan`'s, for tests and benches.
    """
    rows, heads, width = q.shape
    batch, latent = len(prefix_lens), out.shape[-1]
    vectors = {"ancestors": (ancestors, rows, torch.int64), "widths": (widths, batch, torch.int32)}
    check(q, cache, page_table, prefix_lens, row_start, out, **vectors)
    if rows > workspace.rows or (heads, latent) != (workspace.heads, workspace.latent):
        held = (workspace.rows, workspace.heads, workspace.latent)
        raise ValueError(f"the workspace is for {held} (rows, heads, latent), not {(rows, heads, latent)}")
    if not q.is_cuda:
        out.copy_(tree_attention_reference(q, cache, page_table, prefix_lens, row_start, ancestors, latent))
        return
    form = form or plan(rows, heads, batch, latent, page_table.shape[1], _processors(q.device))
    fixed = {"C": latent, "P": width - latent, "SPLITS": workspace.splits, "BP": triton.next_power_of_2(batch)}
    states = (workspace.sums, workspace.scalars, workspace.open_sums)
    boxes = descriptors(q, cache, latent, form.lines)
    stride = page_table.stride(0)
    tiles = rows * heads // form.lines + batch  # at most
    grid = (max(form.programs, tiles),)
    about = (page_table, prefix_lens, row_start, widths)
    if form.lines == 64:
        prefix_wide[grid](
            *boxes, *about, *states, batch, form.programs, heads, stride, **fixed, num_warps=8, launch_pdl=True
        )
    else:
        cut = {"BM": form.lines, "STAGES": form.stages}
        prefix_narrow[grid](
            *boxes, *about, *states, batch, form.programs, heads, stride, **fixed, **cut, num_warps=4, launch_pdl=True
        )
    whole = form.columns == latent
    warps = 8 if whole and latent == 512 else 4
    path_merge[(rows * -(-heads // 8) * (latent // form.columns),)](
        q,
        cache,
        *about,
        ancestors,
        out,
        *states,
        batch,
        heads,
        stride,
        **fixed,
        CT=form.columns,
        W=warps,
        AHEAD=4 if whole else 16,
        num_warps=warps,
        launch_pdl=True,
    )
