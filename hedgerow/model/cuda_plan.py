"""A step's rows as the GPU reads them: one block of 32-bit integers, checked on the host, sent in one copy.

Counts are rounded up to buckets, so that few shapes exist; what fills a bucket up is padding (sequence -1), which no
op computes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from hedgerow.errors import InvalidRequest
from hedgerow.model.batch import SequenceRows
from kernels.gpu.row_layout import DEEPEST, PAGE

MOST_SEQUENCES = 64  # of a step
Ints = npt.NDArray[np.int32]
Block = TypeVar("Block", Ints, torch.Tensor)


class Shape(NamedTuple):
    """The bucket of a step. `wanted` rows have logits; equal to `rows`: all have."""

    rows: int
    wanted: int
    sequences: int
    pages: int  # of a sequence, at most
    output: bool  # has rows of path D
    prompt: bool  # has rows of path P

    @property
    def words(self) -> int:
        return 4 * self.rows + self.wanted + (4 + self.pages) * self.sequences + 1


class Fields(NamedTuple, Generic[Block]):
    """The parts of a step's block, as NumPy's or torch's."""

    tokens: Block  # [rows]
    parents: Block  # [rows], within the sequence; -1: right after the prefix
    seq: Block  # [rows]; -1: padding
    prompts: Block  # [rows]: seq of the rows of path P; -1: padding, -2: a row of path D
    wanted: Block  # [wanted]
    first: Block  # [sequences]
    prefix: Block  # [sequences]
    chain: Block  # [sequences]
    starts: Block  # [sequences + 1]: the first rows of path D's sequences, which come first; then how many they are
    pages: Block  # [sequences, pages]


def split(block: Block, shape: Shape) -> Fields[Block]:
    """Views of `block` [shape.words]."""
    q = shape.sequences
    sizes = (*[shape.rows] * 4, shape.wanted, q, q, q, q + 1, q * shape.pages)
    parts, begin = list[Block](), 0
    for size in sizes:
        parts.append(block[begin : begin + size])
        begin += size
    parts[-1] = parts[-1].reshape(shape.sequences, shape.pages)
    return Fields(*parts)


class Step(NamedTuple):
    """What is asked, flat."""

    rows: int
    wanted: Ints
    tokens: array[int]
    parents: array[int]
    counts: list[int]  # rows of each sequence
    outputs: int  # sequences of path D; they come first
    chains: list[bool]
    parts: Sequence[SequenceRows]


def bucket(count: int) -> int:
    """The next power of two, or three quarters of it."""
    size = 1 << max(count - 1, 0).bit_length()
    return size * 3 // 4 if size >= 32 and count <= size * 3 // 4 else size


def read(parts: Sequence[SequenceRows], vocab: int, positions: int, pages: int) -> Step:
    """Checks a step against the model's and the cache's limits. InvalidRequest names field, value and limit."""
    if not parts:
        raise InvalidRequest("rows", 0, "at least one sequence")
    if len(parts) > MOST_SEQUENCES:
        raise InvalidRequest("rows", len(parts), f"at most {MOST_SEQUENCES} sequences, on a CUDA device")
    tokens, parents, wanted = array("i"), array("i"), array("i")
    counts, chains = list[int](), list[bool]()
    for n, part in enumerate(parts):
        count, first = len(part.tokens), len(tokens)
        chain = _check(n, part, count, positions, pages)
        try:
            tokens.extend(part.tokens)
            parents.extend(part.parents)
            wanted.extend(first + row for row in part.want_logits)
        except (OverflowError, TypeError) as error:
            raise InvalidRequest(f"rows[{n}]", str(error), "integers of 32 bits") from None
        counts.append(count)
        chains.append(chain)
    ids = np.frombuffer(tokens, np.int32)
    if ids.min() < 0 or ids.max() >= vocab:
        row = int(((ids < 0) | (ids >= vocab)).argmax())
        raise InvalidRequest("rows.tokens", int(ids[row]), f"within the vocabulary of {vocab} (row {row})")
    outputs = sum(not part.prompt for part in parts)
    if any(part.prompt for part in parts[:outputs]):
        raise InvalidRequest("rows", "a prompt's", "behind the rows of output")
    return Step(len(tokens), np.frombuffer(wanted, np.int32), tokens, parents, counts, outputs, chains, parts)


def _check(n: int, part: SequenceRows, count: int, positions: int, pages: int) -> bool:
    """Whether the rows are a chain. InvalidRequest."""

    def fail(field: str, value: object, limit: str) -> InvalidRequest:
        return InvalidRequest(f"rows[{n}].{field}", value, limit)

    if not count:
        raise fail("tokens", 0, "at least one")
    if len(part.parents) != count:
        raise fail("parents", len(part.parents), f"as many as tokens, {count}")
    if not 0 <= part.prefix < positions:
        raise fail("prefix", part.prefix, f"at least 0 and below the model's {positions} positions")
    if len(part.pages) * PAGE < part.prefix + count:
        raise fail("pages", len(part.pages), f"enough for {part.prefix} positions and {count} rows")
    if not all(0 <= page < pages for page in part.pages):
        raise fail("pages", max(part.pages), f"within the cache's {pages} pages")
    chain = part.parents == range(-1, count - 1) or all(parent == row - 1 for row, parent in enumerate(part.parents))
    if not chain and count > DEEPEST:
        raise fail("tokens", count, f"at most {DEEPEST} rows of a tree, on a CUDA device")
    if not part.prompt and count > DEEPEST:
        raise fail("tokens", count, f"at most {DEEPEST} rows of output, on a CUDA device")
    if part.prompt and not chain:
        raise fail("parents", list(part.parents), "a chain, of a prompt")
    if not chain and not all(-1 <= parent < row for row, parent in enumerate(part.parents)):
        raise fail("parents", list(part.parents), "-1 or a row before it")
    deepest = count if chain or part.prefix + count <= positions else 1 + max(_depths(part.parents))
    if part.prefix + deepest > positions:
        raise fail("prefix", part.prefix, f"with {deepest} rows below each other within {positions} positions")
    if not _ascending(part.want_logits, count):
        raise fail("want_logits", list(part.want_logits), f"ascending rows of the {count}")
    return chain


def _ascending(wanted: Sequence[int], count: int) -> bool:
    """Whether these are distinct rows of `count`, in order."""
    if not len(wanted):
        return True
    if not (wanted[0] >= 0 and wanted[-1] < count):
        return False
    if isinstance(wanted, range):
        return wanted.step > 0
    return all(before < after for before, after in pairwise(wanted))


def _depths(parents: Sequence[int]) -> list[int]:
    depths = list[int]()
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


def fill(fields: Fields[Ints], step: Step, base: int) -> None:
    """Writes the step into its block on the host; `base`: the cache's first page in its arena."""
    rows, sequences = step.rows, len(step.parts)
    fields.tokens[:rows] = np.frombuffer(step.tokens, np.int32)
    fields.tokens[rows:] = 0
    fields.parents[:rows] = np.frombuffer(step.parents, np.int32)
    fields.seq[:rows] = np.repeat(np.arange(sequences, dtype=np.int32), step.counts)
    fields.seq[rows:] = -1
    ends = np.cumsum(step.counts)
    own = int(ends[step.outputs - 1]) if step.outputs else 0
    fields.prompts[:own] = -2
    fields.prompts[own:] = fields.seq[own:]
    fields.starts[0], fields.starts[1 : step.outputs + 1], fields.starts[step.outputs + 1 :] = (
        0,
        ends[: step.outputs],
        own,
    )
    fields.wanted[: len(step.wanted)] = step.wanted
    fields.wanted[len(step.wanted) :] = 0
    fields.first[:sequences] = ends - step.counts
    fields.chain[:sequences] = step.chains
    fields.prefix[sequences:] = 0
    for n, part in enumerate(step.parts):
        fields.prefix[n] = part.prefix
        fields.pages[n, : len(part.pages)] = part.pages
        if base:
            fields.pages[n, : len(part.pages)] += base
