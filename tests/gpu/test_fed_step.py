"""What stands between a draft, its verification and the next draft, against references on the host."""

from __future__ import annotations

import os
import random

import pytest
import torch

pytest.importorskip("triton")

from kernels.gpu.fed_step import LINE, Contexts, Places, Rows, follow_on, pack, pack_reference, pick
from kernels.gpu.tree_accept import MOST_ROWS

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
VOCABULARY, ROUNDS = 50, 4 if INTERPRETED else 200
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def blank(*shape: int) -> torch.Tensor:
    return torch.full(shape, 77, dtype=torch.int32, device=DEVICE)


def places(live: list[int], anchor: list[int], prefix: list[int], last: list[int]) -> Places:
    return Places(ints(live), ints(anchor), ints(prefix), ints([p + 1 for p in prefix]), ints(last))


@pytest.mark.parametrize("sequences", [1, 4, 16])
@pytest.mark.parametrize("nodes", [8, 63])
def test_rows_are_those_of_the_trees(sequences: int, nodes: int) -> None:
    """Trees that are whole, empty, too long, or nonsense; sequences that are dead, and that nobody asks for."""
    for seed in range(ROUNDS):
        choose = random.Random(seed)
        trees, lines = list[tuple[list[int], list[int]]](), list[list[int]]()
        for _ in range(sequences):
            count = choose.choice([0, nodes, choose.randint(0, nodes)])
            tokens = [choose.choice([choose.randrange(VOCABULARY), -1, VOCABULARY, 1 << 30]) for _ in range(count)]
            parents = [choose.choice([choose.randint(-1, n - 1), n, -7]) for n in range(count)]
            trees.append((tokens, parents))
            rest = [9] * (nodes - count)
            lines.append([*tokens, *rest, *parents, *rest, *[1] * nodes, choose.choice([count, count])])
        live = [choose.choice([0, 1, 1]) for _ in range(sequences)]
        ask = [choose.choice([-1, 0, nodes, choose.randint(1, nodes)]) for _ in range(sequences)]
        anchor = [choose.randrange(VOCABULARY) for _ in range(sequences)]
        wanted = pack_reference(trees, live, ask, anchor, VOCABULARY)
        total, most = sum(len(tokens) for tokens, _ in wanted), sequences * (nodes + 1)
        count = choose.choice([most, max(total, 1)])
        rows = Rows(blank(count), blank(count), blank(count), blank(sequences), blank(sequences + 1))
        pack(ints([x for line in lines for x in line]).view(sequences, -1), places(live, anchor, anchor, anchor),
             ints(ask), rows, VOCABULARY)  # fmt: skip
        flat = [token for tokens, _ in wanted for token in tokens]
        up = [parent for _, parents in wanted for parent in parents]
        of = [s for s, (tokens, _) in enumerate(wanted) for _ in tokens]
        pad = count - total
        assert rows.tokens.tolist() == flat + [0] * pad
        assert rows.parents.tolist() == up + [-1] * pad
        assert rows.seq.tolist() == of + [-1] * pad
        starts = [sum(len(tokens) for tokens, _ in wanted[:s]) for s in range(sequences + 1)]
        assert rows.starts.tolist() == starts
        assert rows.first.tolist() == starts[:-1]


def test_without_trees_the_rows_are_anchors() -> None:
    rows = Rows(blank(4), blank(4), blank(4), blank(4), blank(5))
    pack(None, places([1, 0, 1, 1], [5, 6, 7, 8], [1] * 4, [9] * 4), ints([0, 0, -1, 3]), rows, VOCABULARY, first=True)
    assert rows.tokens.tolist() == [5, 8, 0, 0]
    assert rows.seq.tolist() == [0, 3, -1, -1]
    assert rows.parents.tolist() == [-1] * 4
    assert rows.starts.tolist() == [0, 1, 1, 1, 2]


@pytest.mark.parametrize("drafts", [True, False])
@pytest.mark.parametrize("sequences", [1, 8])
def test_the_next_step_begins_where_the_walks_ended(sequences: int, drafts: bool) -> None:
    """Paths of all lengths, draws that failed, last anchors, contexts that begin within a page or are not there."""
    block = 8 if drafts else 1
    for seed in range(ROUNDS):
        choose = random.Random(seed)
        counts = [choose.choice([0, choose.randint(1, 12)]) for _ in range(sequences)]
        starts = [sum(counts[:s]) for s in range(sequences + 1)]
        paths = [[0, *sorted(choose.sample(range(1, c), choose.randint(0, min(c, block) - 1)))] if c else []
                 for c in counts]  # fmt: skip
        bonus = [choose.choice([-1, *range(20)]) if c else -1 for c in counts]
        prefix = [choose.randint(100, 300) for _ in counts]
        last = [p + choose.choice([0, len(path), 50]) for p, path in zip(prefix, paths, strict=True)]
        begin = [choose.choice([-1, 0, 63, 64, 99]) for _ in counts]
        pages = [[choose.randrange(1000) for _ in range(6)] for _ in counts]
        walks = [[*path, *[-1] * (MOST_ROWS - len(path)), len(path), b] for path, b in zip(paths, bonus, strict=True)]
        at = places([1] * sequences, [3] * sequences, prefix, last)
        of = Contexts(
            blank(sequences * block), blank(sequences * block), blank(sequences), blank(sequences), blank(sequences),
            ints(begin), ints([p for line in pages for p in line]).view(sequences, -1), blank(sequences * block),
            blank(sequences * block), blank(sequences * block),
        )  # fmt: skip
        told = blank(sequences, LINE + block)
        follow_on(
            ints([x for w in walks for x in w]).view(sequences, -1), ints(starts), at, of if drafts else None, told
        )
        for s, path in enumerate(paths):
            assert told[s].tolist() == [len(path), bonus[s], *path, *[-1] * (block - len(path))]
            now = prefix[s] + len(path)
            on = bool(path) and bonus[s] >= 0 and now <= last[s]
            stands = (1, bonus[s], now, now + 1) if on else (0, 0, 0, 1)
            assert (at.live[s], at.anchor[s], at.prefix[s], at.draws[s], at.last[s]) == (*stands, last[s])
            if not drafts:
                continue
            mine = slice(s * block, (s + 1) * block)
            taken = len(path) if on and begin[s] >= 0 else 0
            places_ = range(prefix[s], prefix[s] + taken)
            slots = [pages[s][p // 64 - begin[s] // 64] * 64 + p % 64 for p in places_]
            assert of.slot[mine].tolist() == slots + [-1] * (block - taken)
            assert of.at[mine].tolist() == [*places_, *[0] * (block - taken)]
            assert of.source[mine].tolist() == [starts[s] + row for row in path[:taken]] + [-1] * (block - taken)
            assert of.tokens[mine].tolist() == [stands[1], *[77] * (block - 1)], "the places to fill stay"
            assert of.position[mine].tolist() == [stands[2] + i for i in range(block)]
            context = (begin[s], now, now) if taken else (0, 0, 0)
            assert (of.start[s], of.end[s], of.anchor[s]) == context
    assert of.slot.eq(77).all().item() is not drafts


def test_features_are_picked_and_the_others_stay() -> None:
    features = torch.randn(9, 1500, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    out = torch.full((4, 1500), 5.0, device=DEVICE)
    pick(features, ints([8, -1, 0, 8]), out)
    expected = features[[8, 8, 0, 8]]
    expected[1] = 5.0
    assert torch.equal(out, expected)


def test_what_does_not_fit_is_refused_by_name() -> None:
    rows = Rows(blank(4), blank(4), blank(4), blank(2), blank(3))
    with pytest.raises(ValueError, match="live"):
        pack(None, places([1], [1], [1], [1]), ints([0, 0]), rows, VOCABULARY)
    with pytest.raises(ValueError, match="walks"):
        follow_on(blank(2, 9), blank(3), places([1] * 2, [1] * 2, [1] * 2, [1] * 2), None, blank(2, 3))
