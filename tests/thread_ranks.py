"""Ranks that are threads of one process, for tests of the compiled engine; torch's shards need none."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from hedgerow.model.batch import SequenceRows
from hedgerow.model.compiled import CompiledK2
from kernels.collectives import Ranks, ordered_sum

PARENTS = (-1, 0, 0, 1, 1, 3, 5, 2, 6)


class Table:
    """Where ranks that are threads lay their parts down."""

    def __init__(self, count: int) -> None:
        self.parts: list[Any] = [None] * count
        self.barrier = threading.Barrier(count, timeout=60)


class ThreadRanks(Ranks):
    """One of several ranks in this process, each with a thread."""

    def __init__(self, rank: int, table: Table) -> None:
        super().__init__(len(table.parts))
        self.mine, self.rank, self.table = range(rank, rank + 1), rank, table

    def all(self, part: torch.Tensor) -> list[torch.Tensor]:
        self.table.parts[self.rank] = part.clone()
        self.table.barrier.wait()
        found = list(self.table.parts)
        self.table.barrier.wait()
        return found

    def sum(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return ordered_sum(torch.stack(self.all(parts[0])))

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(self.all(parts[0]), -1)


class Together:
    """All ranks' models as one Target."""

    def __init__(self, folder: Path, count: int, threads: int = 1) -> None:
        table = Table(count)
        self.ranks = [CompiledK2.load(folder, (1, 2), threads, ranks=ThreadRanks(r, table)) for r in range(count)]
        first = self.ranks[0]
        self.config, self.kernel_law, self.architecture = first.config, first.kernel_law, first.architecture
        self.pool = ThreadPoolExecutor(count)

    def each(self, call: Any) -> list[Any]:
        return [future.result() for future in [self.pool.submit(call, n, rank) for n, rank in enumerate(self.ranks)]]

    def new_cache(self, pages: int) -> Any:
        return [rank.new_cache(pages) for rank in self.ranks]

    def forward(self, rows: Sequence[SequenceRows], cache: Any) -> Any:
        found = self.each(lambda n, rank: rank.forward(rows, cache[n]))
        for other in found[1:]:
            assert torch.equal(other.logits, found[0].logits)
            assert torch.equal(other.features, found[0].features)
        return found[0]


def prompt_and_tree(model: Any, prefill: int = 300) -> list[torch.Tensor]:
    """A prompt of more rows than a tile has, then a tree beside a chain."""
    cache = model.new_cache(8)
    tokens = [(11 * i + 5) % model.config.vocab_size for i in range(prefill)]
    first = [SequenceRows(0, (4, 1, 0, 6, 7), tokens, range(-1, prefill - 1), [prefill - 1], True)]
    second = [
        SequenceRows(prefill, (4, 1, 0, 6, 7), range(3, 12), PARENTS, range(9)),
        SequenceRows(0, (2,), [9, 8, 7], range(-1, 2), [2], True),
    ]
    found = []
    for rows in (first, second):
        out = model.forward(rows, cache)
        found += [out.logits.clone(), out.features.clone()]
    return found
