"""Where each row of a step stands and where its keys are: index arithmetic, once a step, shared by all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from hedgerow.model.batch import SequenceRows
from kernels.mla_tree_attention import PAGE, AttentionGroup

IN_PAGE = np.arange(PAGE)
# [64, 1, 64]: what a row sees of its page, by its offset in the page
MASKS = torch.full((PAGE, PAGE), float("-inf")).triu_(1).unsqueeze(1)


class Layout(NamedTuple):
    """One step. Rows are numbered sequence by sequence."""

    tokens: torch.Tensor  # [rows]
    positions: torch.Tensor  # [rows]
    slots: torch.Tensor  # [rows] where each row's latent is written
    groups: Sequence[AttentionGroup]
    wanted: torch.Tensor | None  # rows whose logits are needed; None: all


@dataclass
class Draft:
    """A layout under construction."""

    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    groups: list[AttentionGroup] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)


def build_layout(sequences: Sequence[SequenceRows]) -> Layout:
    """The layout of one step over any mix of plain rows, trees and chains."""
    draft = Draft()
    for rows in sequences:
        first = len(draft.positions)
        draft.wanted += [first + row for row in rows.want_logits]
        add = add_chain if is_chain(rows.parents) else add_tree
        add(draft, rows, first)
    positions = torch.tensor(draft.positions)
    masks = MASKS.index_select(0, positions % PAGE)
    return Layout(
        torch.tensor([token for rows in sequences for token in rows.tokens]),
        positions,
        torch.tensor(draft.slots),
        [group._replace(mask=masks[group.rows]) for group in draft.groups],
        None if len(draft.wanted) == len(draft.positions) else torch.tensor(draft.wanted, dtype=torch.int64),
    )


def is_chain(parents: Sequence[int]) -> bool:
    return all(parent == row - 1 for row, parent in enumerate(parents))


def add_chain(draft: Draft, rows: SequenceRows, first: int) -> None:
    """Position and slot run together, so the rows of a page share all their keys."""
    start, end = rows.prefix, rows.prefix + len(rows.tokens)
    for page in range(start // PAGE, (end - 1) // PAGE + 1):
        low, high = max(start, page * PAGE), min(end, (page + 1) * PAGE)
        offset = (rows.pages[page] - page) * PAGE
        draft.positions += range(low, high)
        draft.slots += range(low + offset, high + offset)
        members = slice(first + low - start, first + high - start)
        draft.groups.append(AttentionGroup(members, page * PAGE, whole_pages(rows.pages, page + 1), None, MASKS))


def add_tree(draft: Draft, rows: SequenceRows, first: int) -> None:
    """Groups by (start of the row's page, deepest ancestor before it)."""
    paths: list[list[int]] = []  # slots of each row's ancestors and itself, by depth
    members: dict[tuple[int, int], list[int]] = {}
    for row, parent in enumerate(rows.parents):
        at = rows.prefix + row
        paths.append([*(paths[parent] if parent >= 0 else ()), rows.pages[at // PAGE] * PAGE + at % PAGE])
        position = rows.prefix + len(paths[row]) - 1
        start = position // PAGE * PAGE
        crossing = paths[row][start - rows.prefix - 1] if start > rows.prefix else -1
        members.setdefault((start, crossing), []).append(row)
        draft.positions.append(position)
        draft.slots.append(paths[row][-1])
    for (start, _), group in members.items():
        draft.groups.append(tree_group(rows, [paths[row] for row in group], group, start, first))


def tree_group(
    rows: SequenceRows, paths: Sequence[list[int]], members: list[int], start: int, first: int
) -> AttentionGroup:
    inner = max(0, start - rows.prefix)  # positions of the path before `start`
    seen = max(0, rows.prefix - start)  # positions of the prefix from `start` on
    page = rows.pages[start // PAGE] * PAGE
    tail = np.empty((len(members), PAGE), dtype=np.int64)
    tail[:] = page + IN_PAGE
    for line, path in zip(tail, paths, strict=True):
        line[seen : seen + len(path) - inner] = path[inner:]
    keys = whole_pages(rows.pages, (start - inner) // PAGE) if inner == 0 else crossed(rows, paths[0][:inner])
    one_run = members[-1] - members[0] == len(members) - 1
    which = slice(first + members[0], first + members[-1] + 1) if one_run else torch.tensor(members) + first
    return AttentionGroup(which, start, keys, torch.from_numpy(tail.ravel()), MASKS)


def whole_pages(pages: Sequence[int], count: int) -> slice | torch.Tensor:
    """Slots of the first `count` pages: a slice where they lie side by side."""
    if count == 0:
        return slice(0, 0)
    if all(pages[i] + 1 == pages[i + 1] for i in range(count - 1)):
        return slice(pages[0] * PAGE, (pages[0] + count) * PAGE)
    return torch.from_numpy((np.array(pages[:count])[:, None] * PAGE + IN_PAGE).ravel())


def crossed(rows: SequenceRows, path: Sequence[int]) -> torch.Tensor:
    """Slots of the whole prefix, then of `path`."""
    pages = np.array(rows.pages)[: rows.prefix // PAGE + 1]
    prefix = (pages[:, None] * PAGE + IN_PAGE).ravel()[: rows.prefix]
    return torch.from_numpy(np.concatenate([prefix, np.array(path)]))
