"""Which shapes a target's steps come in on a GPU: fine ones for trees alone, few for what is beside prompts.

A step is padded to its shape. Every shape is a graph of its own, and some have kernels of their own, so their number is
what warming up takes. `room`: rows that the buffers have; a shape that would need more has as many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from hedgerow.model.cuda_plan import MOST_SEQUENCES, SEQUENCES, Shape, Step, at_least, bucket
from kernels.gpu.row_layout import DEEPEST

# Of steps that are not of trees alone: each goes with each, and what they compute outweighs the padding.
ROWS, WANTED, BESIDE = (16, 32, 64, 96, 128, 192, 256, 320, 512), (16, 64, 256), (12, 40, MOST_SEQUENCES)


def shape_of(step: Step, room: int, pages: int) -> Shape:
    """The shape that `step` is padded to; of a sequence's page table: `pages`."""
    wanted, count = len(step.wanted), len(step.parts)
    if wanted == step.rows and step.outputs == count:
        rows = min(bucket(step.rows), max(room, step.rows))
        return Shape(rows, rows, at_least(count, SEQUENCES), pages, True, False)
    rows = _bound(step.rows, room)
    heads = min(rows, at_least(wanted, WANTED)) if wanted else 0
    return Shape(rows, heads, at_least(count, BESIDE), pages, step.outputs > 0, step.outputs < count)


def tree_shapes(sequences: int, each: int, room: int, pages: int) -> Iterator[Shape]:
    """Of all steps of up to `sequences` trees of up to `each` rows."""
    before = 0
    for size in _up_to(sequences, SEQUENCES):
        most = min(size, sequences) * each
        for rows in _ascending(before + 1, most, lambda count: min(bucket(count), room)):
            yield Shape(rows, rows, size, pages, True, False, True)
        before = size


def shapes_beside(sequences: int, each: int, prompt_rows: int, room: int, pages: int) -> Iterator[Shape]:
    """Of steps with up to `prompt_rows` rows of prompts or replays, alone and beside trees. Those are whole where all
    that is drawn are trees: until a prompt's last row."""
    if not prompt_rows:
        return
    for rows in _ascending(1, prompt_rows, lambda count: _bound(count, room)):
        for wanted in (0, min(rows, WANTED[0])):
            yield Shape(rows, wanted, BESIDE[0], pages, False, True)
        yield Shape(rows, 0, BESIDE[0], pages, True, False)
    most_places = min(sequences + prompt_rows // DEEPEST, MOST_SEQUENCES)  # a chunk counts as several (cuda_plan.read)
    for beside in _up_to(most_places, BESIDE):
        most = min(beside, sequences) * each
        for rows in _ascending(1, most + prompt_rows, lambda count: _bound(count, room)):
            for wanted in _ascending(1, min(rows, most), lambda count: at_least(count, WANTED)):
                shape = Shape(rows, min(rows, wanted), beside, pages, True, True)
                yield from (shape._replace(whole=True), shape)


def _up_to(count: int, sizes: Sequence[int]) -> list[int]:
    return [size for size in sizes if size < count] + [at_least(count, sizes)]


def _ascending(first: int, most: int, bucket_of: Callable[[int], int]) -> Iterator[int]:
    """The buckets of the counts from `first` to `most`."""
    size = bucket_of(first)
    yield size
    while size < most:
        size = bucket_of(size + 1)
        yield size


def _bound(rows: int, room: int) -> int:
    size = at_least(rows, ROWS)
    return min(size, room) if rows <= room else size
