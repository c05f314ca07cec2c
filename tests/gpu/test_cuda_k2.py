"""The target on a GPU against PyTorch's, and the bits of its rows. Under Triton's interpreter: a tiny one's values."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from hedgerow.errors import InvalidRequest
from hedgerow.model.batch import SequenceRows
from hedgerow.model.cuda import COUNTED, CudaK2
from hedgerow.model.k2 import K2Model
from hedgerow.model.selfcheck import PARENTS, plain_logits, tree_logits
from kernels.sample import Law
from kernels.tree_accept import WalkRows
from tests.tiny import TinyDrafter, TinyTarget, write_tiny

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SAPLING, FEATURES = Path("models/sapling"), (1, 4, 7)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of divisions by a weight of 0
]
BITS = pytest.mark.skipif(INTERPRETED, reason="NumPy's products depend on the row count")


class Pair:
    """The same checkpoint on both engines."""

    def __init__(self, folder: Path, features: tuple[int, ...]) -> None:
        device = torch.device("cpu" if INTERPRETED else "cuda")
        self.model = CudaK2.load(folder, features, device, torch.float32 if INTERPRETED else torch.bfloat16)
        self.reference = K2Model.load(folder, features)
        self.features = features
        choose = random.Random(0)
        self.prompt = [choose.randrange(256) for _ in range(6 if INTERPRETED else 70)]
        self.tree = [choose.randrange(256) for _ in PARENTS]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    if INTERPRETED:
        small = TinyTarget(layers=2, experts=4)
        paths = write_tiny(tmp_path_factory.mktemp("tiny"), small, TinyDrafter(feature_layers=(1, 0)))
        return Pair(paths.target, paths.feature_layers)
    return Pair(SAPLING, FEATURES)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Within rounding: of float32 under the interpreter, else of bfloat16 through all layers."""
    got, scale = got.cpu(), float(expected.std())
    if INTERPRETED:
        assert float((got - expected).abs().max()) < 1e-4 * max(1.0, scale)
        return
    assert float((got - expected).square().mean().sqrt()) < 0.05 * scale
    assert float((got.argmax(-1) == expected.argmax(-1)).float().mean()) > 0.8


def test_a_prompt_and_a_tree_are_what_pytorch_computes(pair: Pair) -> None:
    chunks = [len(pair.prompt)]
    got = tree_logits(pair.model, pair.prompt, pair.tree, chunks)
    close(got, tree_logits(pair.reference, pair.prompt, pair.tree, chunks))


def test_some_steps_have_the_last_layers_experts_counted(pair: Pair) -> None:
    """Those of the step's rows and not of what they are padded with, and of a step only once."""
    model, cache, counted = pair.model, pair.model.new_cache(1), dict[int, float]()

    def rows(n: int) -> list[SequenceRows]:
        return [SequenceRows(0, [0], pair.prompt[: 1 + n % 5], range(-1, n % 5), range(0))]  # nothing drawn: it waits

    for n in range(2 * COUNTED):
        model.forward(rows(n), cache)
        if (found := model.experts()) is not None:
            counted[n] = found
        assert model.experts() is None
    assert len(counted) == 2
    for n, found in counted.items():
        pair.reference.forward(rows(n), pair.reference.new_cache(1))
        expected = pair.reference.routes[-1].unique().numel()
        assert abs(found - expected) <= (0 if INTERPRETED else 2), "bfloat16 may choose another one"


@BITS
def test_rows_have_bits_of_their_own(pair: Pair) -> None:
    """In a tree after one chunk, after other chunks, and one by one beside another sequence."""
    whole = tree_logits(pair.model, pair.prompt, pair.tree, [70])
    chunks = tree_logits(pair.model, pair.prompt, pair.tree, [1, 17, 52])
    deepest = [0, 1, 3, 5, 6, 8]
    alone = plain_logits(pair.model, pair.prompt, [pair.tree[row] for row in deepest])
    assert torch.equal(chunks, whole), "a prompt in chunks leaves other bits than the prompt at once"
    assert torch.equal(alone, whole[deepest]), "a row in a tree has other bits than the row alone"


def test_features_and_latents_are_what_pytorch_computes(pair: Pair) -> None:
    last = len(pair.prompt) - 1
    rows = SequenceRows(0, (2, 0), pair.prompt, range(-1, last), [last], True)
    cache, other = pair.model.new_cache(3), pair.reference.new_cache(3)
    got, expected = pair.model.forward([rows], cache), pair.reference.forward([rows], other)
    assert got.features.device.type == "cpu"
    assert got.features.shape == expected.features.shape
    close(got.logits, expected.logits)  # waits for the device
    error = (got.features - expected.features).square().mean().sqrt() / expected.features.std()
    assert float(error) < (1e-5 if INTERPRETED else 0.05)
    slots = [*range(128, 192), *range(6)][: last + 1]
    latents, wanted = cache.read(slots).float(), other.data[:, slots]
    assert float((latents - wanted).square().mean().sqrt() / wanted.std()) < (1e-5 if INTERPRETED else 0.05)


@BITS
def test_a_batch_of_other_sequences_changes_no_bit(pair: Pair) -> None:
    cache = pair.model.new_cache(6)
    prompts = [pair.prompt[:n] for n in (1, 63, 20)]
    alone = [
        pair.model.forward([SequenceRows(0, (n,), p, range(-1, len(p) - 1), [len(p) - 1])], cache).logits.clone()
        for n, p in enumerate(prompts)
    ]
    together = [SequenceRows(0, (n + 3,), p, range(-1, len(p) - 1), [len(p) - 1]) for n, p in enumerate(prompts)]
    got = pair.model.forward(together, cache).logits
    for n, line in enumerate(alone):
        assert torch.equal(got[n], line[0]), n


def test_a_moved_latent_is_the_same_latent(pair: Pair) -> None:
    cache = pair.model.new_cache(2)
    pair.model.forward([SequenceRows(0, (0,), pair.prompt[:4], range(-1, 3), [])], cache)
    before = cache.read(range(4))
    cache.copy([1, 2, 3], [0, 1, 70])
    assert torch.equal(cache.read([0, 1, 70]), before[:, [1, 2, 3]])
    with pytest.raises(InvalidRequest, match="slots"):
        cache.copy([0], [128])


def test_a_step_of_output_and_prompts_has_the_bits_of_steps_apart(pair: Pair) -> None:
    """A tree, a plain row and a prompt's chunk in one step; the prompt comes last."""
    model, cache = pair.model, pair.model.new_cache(12)
    for pages in ((0, 1), (4, 5)):
        model.forward([SequenceRows(0, pages, pair.prompt[:5], range(-1, 4), [], True)], cache)
    tree = SequenceRows(5, (0, 1), pair.tree, PARENTS, range(len(PARENTS)))
    row = SequenceRows(5, (4, 5), [7], [-1], [0])
    chunk = SequenceRows(0, (8, 9), pair.prompt, range(-1, len(pair.prompt) - 1), [len(pair.prompt) - 1], True)
    apart = [model.forward([part], cache).logits.clone() for part in (tree, row, chunk)]
    together = model.forward([tree, row, chunk], cache)
    if INTERPRETED:
        torch.testing.assert_close(together.logits, torch.cat(apart), atol=1e-4, rtol=0)
    else:
        assert torch.equal(together.logits, torch.cat(apart))
    with pytest.raises(InvalidRequest, match="behind the rows of output"):
        model.forward([chunk, row], cache)


LAWS = [Law(0.0, 0, 1.0, 0.0, 1, 0, 12), Law(0.9, 20, 0.95, 0.0, (1 << 63) - 5, 3, 12)]


def test_a_step_in_one_pass_is_the_three_passes(pair: Pair) -> None:
    """Walks, features, and the cache after the moves; the trees hold what is drawn, so that paths are long."""
    parents = PARENTS[: 4 if INTERPRETED else None]
    model, length, count = pair.model, 2 if INTERPRETED else 5, len(parents)
    places, cache = ((0, 1), (3, 2)), model.new_cache(4)
    tokens = [list(pair.tree[:count]) for _ in places]

    def parts() -> list[SequenceRows]:
        return [
            SequenceRows(length, p, t, parents, range(count), limit=100) for p, t in zip(places, tokens, strict=True)
        ]

    def trees() -> list[WalkRows]:
        return [WalkRows(n * count, parents, tokens[n], law) for n, law in enumerate(LAWS)]

    def prompts() -> None:
        chain = pair.prompt[:length], range(-1, length - 1)
        model.forward([SequenceRows(0, pages, *chain, [], True) for pages in places], cache)

    prompts()
    for _ in range(1 if INTERPRETED else 3):  # a level of the drawn tokens more each time
        walked = model.walk(model.forward(parts(), cache).logits, trees())
        for line, found in zip(tokens, walked, strict=True):
            below = [row for row, parent in enumerate(parents) if parent == found.path[-1]]
            if below:
                line[below[0]] = found.bonus
    slots = [*range(length + count), *range(192, 192 + length + count)]
    logits, features = model.forward(parts(), cache)
    walked = model.walk(logits, trees())
    features = features.clone()
    first = (length, 3 * 64 + length)
    moved = [(first[n] + row, first[n] + i) for n, found in enumerate(walked) for i, row in enumerate(found.path)]
    cache.copy(*zip(*moved, strict=True))
    apart = cache.read(slots)
    prompts()
    whole = model.verify(parts(), cache, trees())
    assert whole.walked == walked
    assert max(len(found.path) for found in walked) > 1
    assert torch.equal(whole.features, features)
    assert torch.equal(cache.read(slots), apart)


def test_a_chunk_of_a_prompt_is_in_the_same_pass(pair: Pair) -> None:
    """Beside trees it changes nothing, and it leaves what it leaves alone."""
    model, length, count = pair.model, 2 if INTERPRETED else 5, 3
    parents, cache = PARENTS[:count], model.new_cache(4)
    tree = SequenceRows(length, (0,), pair.tree[:count], parents, range(count), limit=100)
    laws = [WalkRows(0, parents, pair.tree[:count], LAWS[1])]
    chunk = SequenceRows(0, (2, 3), pair.prompt[: length + 1], range(-1, length), [], True)
    slots = [*range(length + count), *range(128, 128 + length + 1)]

    def prompt() -> None:
        model.forward([SequenceRows(0, (0,), pair.prompt[:length], range(-1, length - 1), [], True)], cache)

    prompt()
    alone = model.verify([tree], cache, laws)
    features = alone.features.clone()
    rest = model.forward([chunk], cache).features.clone()
    apart = cache.read(slots)
    cache.copy([2], [128])  # another latent
    prompt()
    for _ in range(1 if INTERPRETED else 3):  # op by op, recorded, replayed
        together = model.verify([tree, chunk], cache, laws)
        if INTERPRETED:
            assert together.walked == alone.walked
            torch.testing.assert_close(together.features, torch.cat([features, rest]), atol=1e-4, rtol=0)
            continue
        assert together.walked == alone.walked
        assert torch.equal(together.features, torch.cat([features, rest]))
        assert torch.equal(cache.read(slots), apart)


def test_one_pass_draws_trees_alone(pair: Pair) -> None:
    tree = WalkRows(0, (-1,), (1,), LAWS[0])
    anchor = SequenceRows(0, (0,), [1], [-1], [0])
    for rows in (
        [SequenceRows(0, (0,), [1], [-1], [0], True)],
        [SequenceRows(0, (0,), [1, 2], [-1, 0], [1])],
        [SequenceRows(0, (0,), [1, 2], [-1, 0], [0])],
        [anchor, SequenceRows(0, (0,), [1], [-1], [], False)],
        [anchor, SequenceRows(0, (0,), [1], [-1], [0], True)],
    ):
        with pytest.raises(InvalidRequest, match="behind them prompts without logits"):
            pair.model.verify(rows, pair.model.new_cache(1), [tree])


BAD = {
    "tokens": SequenceRows(0, (0,), [], [], []),
    "parents": SequenceRows(0, (0,), [1, 2, 3], [-1, 2, 0], []),
    "pages": SequenceRows(0, (0,), [1] * 65, range(-1, 64), []),
    "prefix": SequenceRows(4096, (0,), [1], [-1], []),
    "vocabulary": SequenceRows(0, (0,), [1 << 20], [-1], []),
    "want_logits": SequenceRows(0, (0,), [1, 2], [-1, 0], [1, 0]),
    "64 rows of a tree": SequenceRows(0, (0, 1), [1] * 65, [-1] * 65, []),
    "64 rows of output": SequenceRows(0, (0, 1), [1] * 65, range(-1, 64), []),
    "2 pages": SequenceRows(0, (2,), [1], [-1], []),
}


@pytest.mark.parametrize("what", BAD)
def test_rows_that_make_no_sense_are_refused(pair: Pair, what: str) -> None:
    with pytest.raises(InvalidRequest, match=what):
        pair.model.forward([BAD[what]], pair.model.new_cache(2))
