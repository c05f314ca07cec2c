"""What steps take on this machine, measured before the first request and kept in a file for the next start.

The steps are the engine's own, rows built, computed, drawn and moved, of sequences that are made up: a few batches,
trees and contexts, the smallest first, until the time is up. Which experts rows choose depends on texts, and these have
none: a step's distinct experts are counted where the model can say, and expected by number of rows where not.

The file is for one checkpoint, law, engine, device and number of threads. One that cannot be read, or is of something
else, counts as none; one that cannot be written is measured again at the next start. Neither stops a start.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import platform
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from hedgerow.engine import rows
from hedgerow.engine.config import EngineConfig
from hedgerow.engine.costs import CostModel, Load, distinct
from hedgerow.engine.scheduler import Work
from hedgerow.engine.sequence import AttachedSequence, Phase
from hedgerow.engine.tree import Tree, TreeConfig
from hedgerow.engine.types import Sampling, Start
from hedgerow.errors import HedgerowError
from hedgerow.model.fields import ConfigError
from hedgerow.model.interface import Cache, Target, WholeSteps, experts_of, shards
from hedgerow.model.manifest import write_whole
from kernels.cpu.build import BUILDS

BATCHES, BUDGETS, KEYS = (1, 4, 16), (0, 4, 16), (60, 1000)
REPEATS = 3  # of a step, of which the shortest counts: in the others somebody else had the cores
FILES = 16  # that are kept in a folder; the oldest go
NOWHERE = Path(os.devnull) / "hedgerow"  # cannot be read or written
log = logging.getLogger(__name__)


class Cell(NamedTuple):
    """A step: so many sequences after so many keys, each with a tree of so many nodes."""

    batch: int
    budget: int
    keys: int

    @property
    def rows(self) -> int:
        return self.batch * TreeConfig(self.budget).q_len


def cost_model(
    model: Target, cache: Cache, limits: EngineConfig, seconds: float, device: str, folder: Path | None = None
) -> CostModel | None:
    """From the file, or measured within about `seconds` and written; None where that cannot be. Raises nothing.

    `folder`: for the file; None: that of compiled engines or, where that cannot be written, a temporary one.
    """
    try:
        subject = _subject(model, device)
        name = f"costs-{hashlib.sha256(subject.encode()).hexdigest()[:24]}.json"
        file = (folder or _folder()) / name
        if (known := _read(file, subject)) is not None:
            return known
        steps = measured(model, cache, limits, seconds)
        if len(steps) < len(Load([], [], 0).terms):
            log.info("too few steps in %.1f s for a cost model: %d", seconds, len(steps))
            return None
        c = model.config
        found = CostModel.fit(
            steps, machine=device, law=model.kernel_law, ranks=shards(model), experts=c.n_routed_experts,
            top_k=c.num_experts_per_tok, subject=subject,
        )  # fmt: skip
        _keep(file, found)
        return found
    except Exception:
        log.exception("what steps take could not be measured: it is learned from those that run")
        return None


def device_name(device: str) -> str:
    """Of the GPU, or of the CPU with its cores that this process may use."""
    if device == "cuda":
        return torch.cuda.get_device_name(0)
    names = set[str]()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = {line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")}
    return f"{', '.join(sorted(names)) or platform.machine()}, {torch.get_num_threads()} threads"


@torch.inference_mode()
def measured(model: Target, cache: Cache, limits: EngineConfig, seconds: float) -> list[tuple[Load, float]]:
    """Steps and their milliseconds. Writes to the cache's first pages, of which nobody may hold any."""
    end, found, each = time.perf_counter() + seconds, list[tuple[Load, float]](), 0.0  # seconds of a row, so far
    for cell in _cells(model, cache, limits):
        took = math.inf
        for n in range(REPEATS):
            begun = time.perf_counter()
            if begun + (each * cell.rows if took == math.inf else took) > end:
                break
            _step(model, cache, cell)
            last = time.perf_counter() - begun
            took = last if n == 0 else min(took, last)
        if took == math.inf:
            break
        each = took / cell.rows
        c = model.config
        seen = experts_of(model)() or distinct(c.n_routed_experts, c.num_experts_per_tok, 1, cell.rows)
        load = Load([TreeConfig(cell.budget).q_len] * cell.batch, [cell.keys] * cell.batch, seen)
        found.append((load, 1000 * took))
    return found


def _cells(model: Target, cache: Cache, limits: EngineConfig) -> Iterator[Cell]:
    """What the engine's limits allow, by rows and keys."""
    positions = min(limits.max_context or math.inf, model.config.max_position_embeddings)
    cells = [Cell(batch, budget, keys) for batch in BATCHES for budget in BUDGETS for keys in KEYS]
    for cell in sorted(cells, key=lambda cell: (cell.rows, cell.keys)):
        slots = cell.keys + TreeConfig(cell.budget).q_len
        held = cell.batch * -(-slots // cache.page_size)
        allowed = cell.batch <= limits.max_sequences and cell.budget <= limits.max_budget
        if allowed and slots < positions and held <= cache.pages:
            yield cell


def _step(model: Target, cache: Cache, cell: Cell) -> None:
    whole = model if isinstance(model, WholeSteps) else None
    each = -(-(cell.keys + TreeConfig(cell.budget).q_len) // cache.page_size)
    works, trees = list[Work](), dict[int, Tree]()
    for n in range(cell.batch):
        works.append(_work(n, range(n * each, (n + 1) * each), cell, model.config.vocab_size))
        trees[n] = _tree(n, cell.budget, model.config.vocab_size)
    parts = rows.build(works, trees, cache.page_size)
    done = rows.compute(parts, model, whole, cache)
    rows.accept(parts, done, model, cache, frozenset())


def _work(number: int, pages: Sequence[int], cell: Cell, vocab_size: int) -> Work:
    """The anchor's, of a sequence that is made up."""
    sampling = Sampling(max_tokens=cell.budget + 2, ignore_eos=True)
    start = Start("calibration", 1, 1, range(cell.keys), sampling)
    sequence = AttachedSequence(number, start, cell.budget, 1, (), frozenset())
    sequence.output.append(_token(number, -1, vocab_size))
    sequence.cached, sequence.pages = cell.keys, tuple(pages)
    return Work(sequence, Phase.DECODING, cell.keys, 1, cell.budget, sequence.remaining)


def _tree(number: int, nodes: int, vocab_size: int) -> Tree:
    """Two children each, as far as they go: tokens differ, so that rows choose experts each for itself."""
    parents, depth = [(node - 2) // 2 if node > 1 else -1 for node in range(nodes)], list[int]()
    for parent in parents:
        depth.append(1 if parent < 0 else depth[parent] + 1)
    return Tree(tuple(_token(number, node, vocab_size) for node in range(nodes)), tuple(parents), tuple(depth))


def _token(number: int, node: int, vocab_size: int) -> int:
    return (number * 1_299_709 + (node + 1) * 104_729 + 17) % vocab_size


def _subject(model: Target, device: str) -> str:
    engine = type(model).__name__
    return f"{model.checkpoint_hash} {model.kernel_law} {model.architecture} {engine} x{shards(model)} on {device}"


def _read(file: Path, subject: str) -> CostModel | None:
    if not file.exists():
        return None
    try:
        found = CostModel.read(file)
    except ConfigError as error:
        log.warning("the file of what steps take is not used: %s", error)
        return None
    if found.subject != subject:
        log.warning("the file of what steps take is not used: %s is about %s", file, found.subject[:200] or "another")
        return None
    with suppress(OSError):
        os.utime(file)  # of many files the ones that are read stay
    return found


def _keep(file: Path, costs: CostModel) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(file, costs.text())
        for old in sorted(file.parent.glob("costs-*.json"), key=lambda each: each.stat().st_mtime)[:-FILES]:
            old.unlink(missing_ok=True)
        log.info("what steps take: %s", file)
    except (OSError, HedgerowError) as error:
        log.info("what steps take is measured again at the next start: %s", error)


def _folder() -> Path:
    """Of compiled engines, or else a temporary one; NOWHERE if that is not this user's alone."""
    with suppress(OSError):
        BUILDS.mkdir(parents=True, exist_ok=True)
        if os.access(BUILDS, os.W_OK):
            return BUILDS
    folder = Path(tempfile.gettempdir()) / f"hedgerow-{os.geteuid()}"
    with suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
            return folder
    return NOWHERE
