"""Where each row of a step stands and where its keys are: index arithmetic, once a step, shared by all layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hedgerow.model.batch import SequenceRows
from kernels.mla_tree_attention import PAGE, AttentionGroup

Ints = npt.NDArray[np.int64]


class Layout(NamedTuple):
    """One step. Rows are numbered sequence by sequence."""

    tokens: torch.Tensor  # [rows]
    positions: torch.Tensor  # [rows]
    slots: torch.Tensor  # [rows] where each row's latent is written
    groups: Sequence[AttentionGroup]
    wanted: torch.Tensor  # rows whose logits are needed


class Paths(NamedTuple):
    """Depth and ancestors of each row of a sequence."""

    depth: Ints  # [rows]
    ancestors: Ints  # [rows, deepest + 1]: the ancestor at each depth, itself at its own; past it: anything valid


def build_layout(sequences: Sequence[SequenceRows]) -> Layout:
    """The layout of one step over any mix of plain rows, trees and chains."""
    positions, slots, groups, wanted, first = [], [], [], [], 0
    for rows in sequences:
        paths = find_paths(rows.parents)
        positions.append(rows.prefix + paths.depth)
        table = (np.asarray(rows.pages, dtype=np.int64)[:, None] * PAGE + np.arange(PAGE)).ravel()
        slots.append(table[rows.prefix : rows.prefix + len(rows.tokens)])
        groups += group_rows(rows, paths, positions[-1], table, first)
        wanted += [first + row for row in rows.want_logits]
        first += len(rows.tokens)
    tokens = [token for rows in sequences for token in rows.tokens]
    return Layout(
        torch.tensor(tokens, dtype=torch.int64),
        torch.from_numpy(np.concatenate(positions)),
        torch.from_numpy(np.concatenate(slots)),
        groups,
        torch.tensor(wanted, dtype=torch.int64),
    )


def find_paths(parents: Sequence[int]) -> Paths:
    """Follows `parents` (before their children; -1: right after the prefix)."""
    rows = len(parents)
    if list(parents) == list(range(-1, rows - 1)):  # a chain: row r's ancestor at depth d is d
        order = np.arange(rows)
        return Paths(order, np.broadcast_to(order, (rows, rows)))
    depth = [0] * rows
    for row, parent in enumerate(parents):
        depth[row] = depth[parent] + 1 if parent >= 0 else 0
    ancestors = np.zeros((rows, max(depth) + 1), dtype=np.int64)
    for row, parent in enumerate(parents):
        if parent >= 0:
            ancestors[row] = ancestors[parent]
        ancestors[row, depth[row]] = row
    return Paths(np.asarray(depth), ancestors)


def group_rows(rows: SequenceRows, paths: Paths, position: Ints, table: Ints, first: int) -> list[AttentionGroup]:
    """Groups by (start of the position's page, deepest ancestor before it)."""
    start = position // PAGE * PAGE
    through = start - 1 - rows.prefix  # depth of that ancestor; negative: only the prefix is before
    ancestor = np.where(through >= 0, paths.ancestors[np.arange(len(position)), np.maximum(through, 0)], -1)
    keys = start * (len(position) + 1) + ancestor
    if (keys == keys[0]).all():
        return [make_group(rows, paths, position, table, np.arange(len(position)), first)]
    return [
        make_group(rows, paths, position, table, np.flatnonzero(keys == key), first)
        for key in dict.fromkeys(keys.tolist())
    ]


def make_group(
    rows: SequenceRows, paths: Paths, position: Ints, table: Ints, members: Ints, first: int
) -> AttentionGroup:
    start = int(position[members[0]]) // PAGE * PAGE
    span = np.arange(start, start + PAGE)
    seen = span <= position[members, None]
    tail = along_path(rows.prefix, paths, members, span, seen)
    whole = first + members
    run = bool((np.diff(whole) == 1).all())
    return AttentionGroup(
        slice(int(whole[0]), int(whole[-1]) + 1) if run else torch.from_numpy(whole),
        find_before(rows, paths, table, int(members[0]), start),
        torch.from_numpy(table[tail].ravel()),
        torch.from_numpy(np.where(seen, np.float32(0), np.float32(-np.inf))[:, None]),
    )


def along_path(prefix: int, paths: Paths, members: Ints, span: Ints, seen: npt.NDArray[np.bool_]) -> Ints:
    """Sequence-local slot of each position of `span` for each member; 0 where it is not seen."""
    depth = np.clip(span - prefix, 0, paths.ancestors.shape[1] - 1)
    local = np.where(span < prefix, span, prefix + paths.ancestors[members[:, None], depth])
    return np.where(seen, local, 0)


def find_before(rows: SequenceRows, paths: Paths, table: Ints, member: int, start: int) -> slice | torch.Tensor | None:
    """Slots of positions 0 .. start-1 on the member's path: a slice where they lie side by side."""
    if start == 0:
        return None
    inner = max(0, start - rows.prefix)
    slots = table[np.concatenate([np.arange(start - inner), rows.prefix + paths.ancestors[member, :inner]])]
    if (np.diff(slots) == 1).all():
        return slice(int(slots[0]), int(slots[-1]) + 1)
    return torch.from_numpy(slots)
