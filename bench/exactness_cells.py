"""The parts of the exactness run, and what comes of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple


class Cell(NamedTuple):
    """One part of the run."""

    setting: str
    trees: str  # "drafter" or "random"
    block: int

    @property
    def name(self) -> str:
        return f"{self.trees}-{self.setting}-{self.block:02d}"


@dataclass
class Tally:
    """What was compared; adds up."""

    sequences: int = 0
    tokens: int = 0
    differences: list[dict[str, object]] = field(default_factory=list)
    seconds: float = 0.0
    steps: int = 0
    fed: int = 0  # of these, that fed the next one on the device

    def add(self, other: Tally) -> None:
        self.sequences += other.sequences
        self.tokens += other.tokens
        self.differences += other.differences
        self.seconds += other.seconds
        self.steps += other.steps
        self.fed += other.fed

    def __str__(self) -> str:
        fed = f", {self.fed} of {self.steps} steps fed" if self.fed else ""
        return f"{self.sequences} sequences, {self.tokens} tokens, {len(self.differences)} differ{fed}"


class Extent(NamedTuple):
    """How much is run."""

    prompts: int
    random: int  # of these, with random trees too
    block: int
    settings: tuple[str, ...]
    budgets: tuple[int, ...]
    batches: tuple[int, ...]

    def cells(self) -> Iterator[Cell]:
        """Block by block, so that a part of the run holds every setting; random trees, which take longest, first."""
        for block in range(-(-min(self.prompts, self.random) // self.block)):
            yield from (Cell(setting, "random", block) for setting in self.settings)
        for block in range(-(-self.prompts // self.block)):
            yield from (Cell(setting, "drafter", block) for setting in self.settings)

    def members(self, cell: Cell) -> list[int]:
        most = min(self.prompts, self.random) if cell.trees == "random" else self.prompts
        return list(range(cell.block * self.block, min((cell.block + 1) * self.block, most)))
