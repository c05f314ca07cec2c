"""A step's rows as the GPU reads them: one block of 32-bit integers, checked on the host, sent in one copy.

Counts are rounded up to buckets, so that few shapes exist; what fills a bucket up is padding (sequence -1), which no
op computes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from hedgerow.errors import InvalidRequest
from hedgerow.model.batch import SequenceRows
from kernels.gpu.mla_tree_attention import MOST_ROWS, split_width
from kernels.gpu.row_layout import DEEPEST, PAGE
from kernels.sample import Law

MOST_SEQUENCES = 64  # of a step
LAW_WORDS = 8  # of a sequence's law: seven numbers, the seed in two words
MOST_TOP_K = 1 << 30
LEAST_PROMPT_WIDTH = 256  # narrower ones would be written more than they are computed
MOST_PROMPT_SPLITS = 64  # of a prompt's row; attention has places for as many, or more
SEQUENCES = (1, 4, 8, 16, 32, 64)  # what their number is rounded up to: attention is compiled for each of these
ALIGNED = 4  # words: every part of a block begins at a multiple, so that kernels are compiled for one alignment
Ints = npt.NDArray[np.int32]
width_of = cache(split_width)
Block = TypeVar("Block", Ints, torch.Tensor)


class Shape(NamedTuple):
    """The bucket of a step. `wanted` rows have logits; equal to `rows`: all have.

    whole: every row is a tree's, and the pass goes on to draw, walk the trees and move the accepted rows' latents.
    """

    rows: int
    wanted: int
    sequences: int
    pages: int  # of a sequence, at most
    output: bool  # has rows of path D
    prompt: bool  # has rows of path P
    whole: bool = False

    @property
    def sizes(self) -> tuple[int, ...]:
        """Words of each of `Fields`."""
        q = self.sequences
        laws = LAW_WORDS * aligned(q) if self.whole else 0
        return (*[self.rows] * 3, self.wanted, *[q] * 4, q + 1, q + 1, laws, q * self.pages)

    @property
    def words(self) -> int:
        return sum(map(aligned, self.sizes))


class Fields(NamedTuple, Generic[Block]):
    """The parts of a step's block, as NumPy's or torch's."""

    tokens: Block  # [rows]
    parents: Block  # [rows], within the sequence; -1: right after the prefix
    seq: Block  # [rows]; -1: padding
    wanted: Block  # [wanted]
    first: Block  # [sequences]
    prefix: Block  # [sequences]
    chain: Block  # [sequences]
    widths: Block  # [sequences]: keys of a split of path D
    starts: Block  # [sequences + 1]: the first rows of path D's sequences, which come first; then how many they are
    chunks: Block  # [sequences + 1]: the same of all, path P's behind path D's
    laws: Block  # of a whole step: [LAW_WORDS, aligned(sequences)], as `fill_laws` writes them
    pages: Block  # [sequences, pages]


def split(block: Block, shape: Shape) -> Fields[Block]:
    """Views of `block` [shape.words]."""
    parts, begin = list[Block](), 0
    for size in shape.sizes:
        parts.append(block[begin : begin + size])
        begin += aligned(size)
    parts[-1] = parts[-1].reshape(shape.sequences, shape.pages)
    return Fields(*parts)


class Place(NamedTuple):
    """Where rows that lie together stand."""

    prefix: int
    pages: Sequence[int]


class Step(NamedTuple):
    """What is asked, flat. A prompt's chunk counts as several sequences, each of at most a tree's rows: its attention
    is that of a replay, but for its width."""

    rows: int
    wanted: Ints
    tokens: array[int]
    parents: array[int]
    counts: list[int]  # rows of each sequence
    outputs: int  # sequences of path D; they come first
    chains: list[bool]
    widths: list[int]
    parts: Sequence[Place]


def prompt_width(position: int) -> int:
    """Keys of a split of path P, for the row at this position: by the position alone, since sessions of any limits
    share rows of prompts. Wider from a power of two on, where splits would be more than MOST_PROMPT_SPLITS."""
    return max(LEAST_PROMPT_WIDTH, (1 << position.bit_length()) // MOST_PROMPT_SPLITS)


def cut(part: SequenceRows) -> Iterator[tuple[int, int]]:
    """First rows and ends of a prompt's chunk as chains, none longer than a tree or of two widths."""
    begin, count = 0, len(part.tokens)
    while begin < count:
        wider = max(LEAST_PROMPT_WIDTH * MOST_PROMPT_SPLITS, 1 << (part.prefix + begin).bit_length())
        end = min(begin + DEEPEST, count, wider - part.prefix)
        yield begin, end
        begin = end


def in_turns(parts: Sequence[SequenceRows]) -> list[list[SequenceRows]]:
    """The same rows as several steps, none of more sequences than attention takes."""
    turns, left = [list[SequenceRows]()], MOST_SEQUENCES
    for part in parts:
        ends = [end for _, end in cut(part)] if part.prompt else [len(part.tokens)]
        begin = 0
        while ends:
            if not left:
                turns, left = [*turns, []], MOST_SEQUENCES
            taken, ends, left = ends[:left], ends[left:], max(left - len(ends), 0)
            turns[-1].append(_between(part, begin, taken[-1]))
            begin = taken[-1]
    return turns


def _between(part: SequenceRows, begin: int, end: int) -> SequenceRows:
    if end - begin == len(part.tokens):
        return part
    wanted = [row - begin for row in part.want_logits if begin <= row < end]
    own = part.tokens[begin:end], range(-1, end - begin - 1), wanted
    return SequenceRows(part.prefix + begin, part.pages, *own, part.prompt, part.limit)


def aligned(words: int) -> int:
    return -(-words // ALIGNED) * ALIGNED


def bucket(count: int) -> int:
    """The next power of two, or three quarters of it."""
    size = 1 << max(count - 1, 0).bit_length()
    return size * 3 // 4 if size >= 32 and count <= size * 3 // 4 else size


def at_least(count: int, sizes: Sequence[int]) -> int:
    """The first of `sizes`, ascending, that holds `count`; twice the last, and so on, where none does."""
    for size in sizes:
        if size >= count:
            return size
    size = sizes[-1]
    while size < count:
        size *= 2
    return size


def read(parts: Sequence[SequenceRows], vocab: int, positions: int, pages: int) -> Step:
    """Checks a step against the model's and the cache's limits. InvalidRequest names field, value and limit."""
    if not parts:
        raise InvalidRequest("rows", 0, "at least one sequence")
    if len(parts) > MOST_SEQUENCES:
        raise InvalidRequest("rows", len(parts), f"at most {MOST_SEQUENCES} sequences, on a CUDA device")
    tokens, parents, wanted = array("i"), array("i"), array("i")
    counts, straight, widths, places = list[int](), list[bool](), list[int](), list[Place]()
    longest = max(
        1, positions - MOST_ROWS
    )  # as far as a width goes: no row of a tree stands past the model's positions
    for n, part in enumerate(parts):
        count, first = len(part.tokens), len(tokens)
        chain = _check(n, part, count, positions, pages)
        try:
            tokens.extend(part.tokens)
            for begin, end in cut(part) if part.prompt else ((0, count),):
                at = part.prefix + begin
                parents.extend(range(-1, end - begin - 1) if part.prompt else part.parents)
                counts.append(end - begin)
                places.append(Place(at, part.pages))
                straight.append(chain)
                widths.append(prompt_width(at) if part.prompt else width_of(min(part.limit or positions, longest)))
            wanted.extend(first + row for row in part.want_logits)
        except (OverflowError, TypeError) as error:
            raise InvalidRequest(f"rows[{n}]", str(error), "integers of 32 bits") from None
    ids = np.frombuffer(tokens, np.int32)
    if ids.min() < 0 or ids.max() >= vocab:
        row = int(((ids < 0) | (ids >= vocab)).argmax())
        raise InvalidRequest("rows.tokens", int(ids[row]), f"within the vocabulary of {vocab} (row {row})")
    outputs = sum(not part.prompt for part in parts)
    if any(part.prompt for part in parts[:outputs]):
        raise InvalidRequest("rows", "a prompt's", "behind the rows of output")
    return Step(
        len(tokens), np.frombuffer(wanted, np.int32), tokens, parents, counts, outputs, straight, widths, places
    )


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
    if min(part.pages) < 0 or max(part.pages) >= pages:
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
    fields.starts[0], fields.starts[1 : step.outputs + 1], fields.starts[step.outputs + 1 :] = (
        0,
        ends[: step.outputs],
        own,
    )
    fields.chunks[0], fields.chunks[1 : sequences + 1], fields.chunks[sequences + 1 :] = 0, ends, rows
    fields.wanted[: len(step.wanted)] = step.wanted
    fields.wanted[len(step.wanted) :] = 0
    fields.first[:sequences] = ends - step.counts
    fields.chain[:sequences] = step.chains
    fields.widths[:sequences], fields.widths[sequences:] = step.widths, PAGE
    fields.prefix[sequences:] = 0
    for n, part in enumerate(step.parts):
        fields.prefix[n] = part.prefix
        fields.pages[n, : len(part.pages)] = part.pages
        if base:
            fields.pages[n, : len(part.pages)] += base


def law_words(laws: int) -> int:
    """Words that `fill_laws` needs for as many."""
    return LAW_WORDS * aligned(laws)


def fill_laws(words: Ints, laws: Sequence[Law]) -> None:
    """Writes laws into `words` [law_words(most)]: three rows of floats, three of integers, the seeds of two words."""
    table, n = words.reshape(LAW_WORDS, -1), len(laws)
    table[:, n:] = 0
    temperature, top_k, top_p, min_p, seed, sample, position = zip(*laws, strict=True)
    floats, wide = table.view(np.float32), table.view(np.uint32)
    floats[0, :n], floats[1, :n], floats[2, :n] = temperature, top_p, min_p
    table[3, :n] = [min(k, MOST_TOP_K) for k in top_k]
    wide[4, :n], wide[5, :n] = sample, position
    table[6:].reshape(-1).view(np.uint64)[:n] = seed
    if n < table.shape[1]:
        table[6:].reshape(-1).view(np.uint64)[n:] = 0
