"""Every step that the limits allow comes in a shape that was prepared, and its block has a place for all of it."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest

pytest.importorskip("triton")

from hedgerow.model.batch import SequenceRows
from hedgerow.model.cuda_plan import (
    ALIGNED,
    MOST_PROMPT_SPLITS,
    MOST_SEQUENCES,
    Shape,
    aligned,
    cut,
    fill,
    fill_laws,
    in_turns,
    prompt_width,
    read,
    split,
)
from hedgerow.model.cuda_shapes import shape_of, shapes_beside, tree_shapes
from kernels.gpu.mla_tree_attention import most_splits
from kernels.sample import Law

PAGES = 20


def tree(choose: random.Random, most: int) -> SequenceRows:
    rows = choose.randint(1, most)
    parents = [-1, *(choose.randrange(row) for row in range(1, rows))]
    return SequenceRows(choose.randint(0, 200), range(PAGES), [7] * rows, parents, range(rows), limit=900)


def chunk(choose: random.Random, rows: int, prompt: bool) -> SequenceRows:
    wanted = [rows - 1] if prompt and choose.random() < 0.5 else []
    return SequenceRows(choose.randint(0, 200), range(PAGES), [7] * rows, range(-1, rows - 1), wanted, prompt, 900)


@pytest.mark.parametrize(("sequences", "each", "prompt_rows"), [(1, 1, 64), (3, 8, 100), (32, 64, 256), (64, 17, 0)])
def test_steps_have_prepared_shapes(sequences: int, each: int, prompt_rows: int) -> None:
    room = max(512, sequences * each + prompt_rows)
    trees = set(tree_shapes(sequences, each, room, PAGES))
    beside = set(shapes_beside(sequences, each, prompt_rows, room, PAGES))
    assert all(shape.whole for shape in trees)
    assert all(shape.output and shape.prompt for shape in beside if shape.whole)
    assert len(trees) + len(beside) < 250
    choose = random.Random(sequences)
    for _ in range(300):
        count = choose.randint(1, sequences)
        parts = [tree(choose, choose.randint(1, each)) for _ in range(count)]
        shape = shape_of(read(parts, 100, 1000, PAGES), room, PAGES)._replace(whole=True)
        assert shape in trees
        assert shape.rows >= sum(len(part.tokens) for part in parts)
        assert shape.sequences >= count
        if prompt_rows:
            rows = choose.randint(1, prompt_rows)
            for some in ([], parts[: count - 1]):
                step = read([*some, chunk(choose, rows, True)], 100, 1000, PAGES)
                shape = shape_of(step, room, PAGES)
                assert shape in beside
                assert not some or shape._replace(whole=True) in beside
                assert shape.rows >= step.rows
                assert shape.wanted >= len(step.wanted)


def test_a_step_that_is_larger_than_the_room_has_its_own_shape() -> None:
    choose = random.Random(0)
    step = read([chunk(choose, 700, True)], 100, 1000, PAGES)
    assert shape_of(step, 512, PAGES).rows == 1024
    assert shape_of(step, 900, PAGES).rows == 900


def test_a_block_has_every_part_at_an_aligned_place() -> None:
    """Path D's rows come first; a width is the session's own."""
    choose = random.Random(0)
    parts = [tree(choose, 8), replace(tree(choose, 3), limit=5900), chunk(choose, 9, True)]
    step = read(parts, 100, 6000, PAGES)
    shape = Shape(33, 13, 4, PAGES, True, True)
    block = np.full(shape.words, 99, np.int32)
    fields = split(block, shape)
    fill(fields, step, 2)
    for name, field in fields._asdict().items():
        assert (field.ctypes.data - block.ctypes.data) % (4 * ALIGNED) == 0, name
    counts = [len(part.tokens) for part in parts]
    own = counts[0] + counts[1]
    assert fields.starts.tolist() == [0, counts[0], own, own, own]
    assert fields.chunks.tolist() == [0, counts[0], own, own + 9, own + 9]
    assert fields.seq.tolist() == [0] * counts[0] + [1] * counts[1] + [2] * 9 + [-1] * (33 - own - 9)
    assert fields.first[:3].tolist() == [0, counts[0], own]
    assert fields.widths.tolist() == [64, 128, 256, 64]
    assert fields.pages[0].tolist() == list(range(2, PAGES + 2))


def test_a_long_chunk_is_several_sequences() -> None:
    """Of at most a tree's rows each, one behind the other, all with the same width whatever the session's limit."""
    step = read([tree(random.Random(0), 1), chunk(random.Random(0), 150, True)], 100, 1 << 18, PAGES)
    fields = split(np.zeros(Shape(192, 16, 8, PAGES, True, True).words, np.int32), Shape(192, 16, 8, PAGES, True, True))
    fill(fields, step, 0)
    assert fields.chunks.tolist() == [0, 1, 65, 129, 151, 151, 151, 151, 151]
    assert fields.starts.tolist() == [0, *[1] * 8]
    assert fields.parents[1:151].tolist() == [*range(-1, 63), *range(-1, 63), *range(-1, 21)]
    assert [at - fields.prefix[1] for at in fields.prefix[1:4]] == [0, 64, 128]
    assert fields.pages[1].tolist() == fields.pages[3].tolist()
    assert set(fields.widths[1:4].tolist()) == {256}
    assert [prompt_width(at) for at in (0, 16383, 16384, 32768, (1 << 18) - 1)] == [256, 256, 512, 1024, 4096]
    assert all(at // prompt_width(at) < MOST_PROMPT_SPLITS <= most_splits(at) for at in range(0, 1 << 18, 63))


@pytest.mark.parametrize(
    ("limit", "width"), [(131_008, 1024), (131_009, 2048), (262_080, 2048), (262_144, 2048), (0, 2048)]
)
def test_the_longest_sessions_of_a_model_have_narrow_splits(limit: int, width: int) -> None:
    """Of 262,144 positions: a tree below the last of them has no row there."""
    part = SequenceRows(0, range(8), [5, 6], (-1, 0), range(2), limit=limit)
    assert read([part], 100, 1 << 18, PAGES).widths == [width]


def test_no_chain_of_a_prompt_has_two_widths() -> None:
    """Wherever a chunk begins and ends, a row is cut with others of its width alone; steps of many take turns."""
    long = SequenceRows(16384 - 100, range(400), [7] * 9000, range(-1, 8999), [5, 8999], True)
    ends = [end for _, end in cut(long)]
    assert 100 in ends
    assert max(end - begin for begin, end in cut(long)) == 64
    others = [tree(random.Random(n), 4) for n in range(3)]
    turns = in_turns([*others, long])
    assert [sum(len(list(cut(part))) if part.prompt else 1 for part in turn) for turn in turns] == [64, 64, 17]
    parts = [part for turn in turns for part in turn if part.prompt]
    assert sum(len(part.tokens) for part in parts) == 9000
    assert [part.prefix - long.prefix for part in parts] == [0, *accumulate(len(part.tokens) for part in parts[:-1])]
    assert [list(part.want_logits) for part in parts] == [[5], [], [len(parts[-1].tokens) - 1]]
    assert turns[0][:3] == others


@pytest.mark.parametrize("count", [1, 3, MOST_SEQUENCES])
def test_laws_are_written_whole(count: int) -> None:
    laws = [Law(0.5 + n, n, 0.25, 0.125, (1 << 63) + n, (1 << 32) - 1 - n, 70 + n) for n in range(count)]
    words = np.full(8 * aligned(count + 1), 99, np.int32)
    fill_laws(words, laws)
    table = words.reshape(8, -1)
    assert table.view(np.float32)[0, :count].tolist() == [law.temperature for law in laws]
    assert table.view(np.float32)[1:3, 0].tolist() == [0.25, 0.125]
    assert table[3, :count].tolist() == [law.top_k for law in laws]
    assert table.view(np.uint32)[4, :count].tolist() == [law.sample_index for law in laws]
    assert table[5, :count].tolist() == [law.position for law in laws]
    assert table[6:].reshape(-1).view(np.uint64)[:count].tolist() == [law.seed for law in laws]
    assert not table[:6, count:].any()
