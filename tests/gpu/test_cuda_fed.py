"""Steps that feed each other on the device against steps that wait for each other. Interpreted: a tiny model's.

Random weights agree with no drafter, so under the interpreter the trees' builder is told the truth by a test and hides
it among wrong nodes: accepted paths are then long, and their rows no neighbours.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from bench.drive import Job, Run
from hedgerow.engine.config import EngineConfig
from hedgerow.engine.drafter import DrafterConfig, DrafterEngine
from hedgerow.engine.fed import FedVerifier
from hedgerow.engine.step import LocalDrafter, step_here
from hedgerow.engine.types import Finish, Sampling
from hedgerow.engine.verifier import VerifierEngine
from hedgerow.errors import InvalidRequest
from hedgerow.model.cuda import CudaK2
from hedgerow.model.cuda_dflash import CudaDFlash
from hedgerow.model.cuda_fed import CudaFed
from hedgerow.model.fed import FedMember, fed_steps
from kernels.sample import Law
from tests.engine_rig import EOS, VOCABULARY, prompt
from tests.tiny import TinyDrafter, TinyTarget, write_tiny

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SAPLING = Path("models/sapling")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of divisions by a weight of 0
    pytest.mark.timeout(230),  # interpreted it is all Python
]
ON_A_CARD = pytest.mark.skipif(INTERPRETED, reason="slow: tests/unit/test_fed_steps.py has it with steps on the host")


class Models:
    def __init__(self, folder: Path) -> None:
        if INTERPRETED:
            paths = write_tiny(folder, TinyTarget(layers=1), TinyDrafter(feature_layers=(0,)))
            self.target = CudaK2.load(paths.target, paths.feature_layers, torch.device("cpu"), torch.float32)
            self.draft = CudaDFlash(paths.drafter, paths.target, torch.device("cpu"), torch.float32)
        else:
            device, drafter = torch.device("cuda"), SAPLING.with_name("sapling-dflash")
            self.draft = CudaDFlash.load(drafter, SAPLING, device)
            self.target = CudaK2.load(SAPLING, self.draft.feature_layers, device)
        vocabulary = self.target.config.vocab_size
        self.vocabulary = VOCABULARY if INTERPRETED else [bytes([n % 128]) for n in range(vocabulary)]
        self.eos = EOS if INTERPRETED else frozenset(self.target.config.eos_token_ids)

    def engine(self, fed: bool, **limits: int) -> VerifierEngine:
        config = EngineConfig(**{"pages": 128, "max_sequences": 32} | limits)
        if not fed:
            return VerifierEngine(self.target, config, self.vocabulary, self.eos)
        engine, feed = FedVerifier(self.target, config, self.vocabulary, self.eos), fed_steps(self.target, self.draft)
        assert feed is not None
        engine.feed(feed)
        return engine

    def drafter(self) -> LocalDrafter:
        return LocalDrafter(DrafterEngine(self.draft, DrafterConfig()))

    def run(self, jobs: Sequence[Job], fed: bool, cancels: dict[int, str] | None = None, **limits: int) -> Ran:
        engine, drafter, done, steps = self.engine(fed, **limits), self.drafter(), Run(), 0
        waiting = sorted(jobs, key=lambda job: job.arrives)
        while waiting or engine.has_work():
            while waiting and (waiting[0].arrives <= steps or not engine.has_work()):
                job = waiting.pop(0)
                done.tokens[job.name] = list(job.committed)
                engine.start(job.start())
            if cancels and steps in cancels:
                engine.cancel(cancels[steps], 1, 1)
            result = step_here(engine, drafter)
            if result is None:
                continue
            steps += 1
            done.take(result)
            for one in result.updates:
                assert one.error is None, one.error
                engine.committed(one.session_id, one.epoch, one.attempt, len(done.tokens[one.session_id]))
        engine.check()
        return Ran(done, engine.fed_steps if isinstance(engine, FedVerifier) else 0)


class Ran:
    def __init__(self, run: Run, fed: int) -> None:
        self.tokens, self.finish, self.usage, self.fed = run.tokens, run.finish, run.usage, fed
        self.steps = len(run.results)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    with torch.inference_mode():
        yield Models(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def apart(models: Models) -> Ran:
    """Interpreted: two sequences, one greedy, one seeded, in steps that wait for each other."""
    return models.run(jobs(2, 0, 5), fed=False)


@pytest.fixture
def truth(models: Models, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Texts: trees of steps that feed each other then hold what follows in them."""
    known = list[list[int]]()
    if not INTERPRETED:
        return known
    made: list[Any] = []
    make = CudaFed._make

    def noted(self: CudaFed, shape: Any) -> Any:
        made.append(make(self, shape))
        return made[-1]

    def tell(logits: torch.Tensor, ask: torch.Tensor, caps: torch.Tensor, out: torch.Tensor) -> None:
        at, nodes = next(one.parts for one in made if one.parts.ask is ask), out.shape[1] // 3
        out.zero_()
        for s, most in enumerate(ask.tolist()):
            position, tokens, parents, above = int(at.fields.prefix[s]), list[int](), list[int](), -1
            texts = [text for text in known if len(text) > position and text[position] == at.anchor[s]]
            if not at.live[s] or not texts or most < 1:
                continue
            text = texts[0]
            for n, token in enumerate(text[position + 1 :]):
                if len(tokens) + 2 > most or n > position % 3:
                    break
                tokens += [(token + 1) % 512, token]
                parents += [above, above]
                above = len(tokens) - 1
            out[s, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
            out[s, nodes : nodes + len(tokens)] = torch.tensor(parents, dtype=torch.int32)
            out[s, -1] = len(tokens)

    monkeypatch.setattr("hedgerow.model.cuda_fed.build", tell)
    monkeypatch.setattr(CudaFed, "_make", noted)
    return known


def jobs(count: int, budget: int, tokens: int) -> list[Job]:
    laws = (Sampling(), Sampling(temperature=0.9, top_p=0.95), Sampling(temperature=0.7, top_k=20))
    return [
        Job(f"s{n}", prompt(3 + n if INTERPRETED else 30 + 5 * n, n),
            replace(laws[n % 3], seed=n, max_tokens=tokens, ignore_eos=n % 2 == 0), budget)
        for n in range(count)
    ]  # fmt: skip


@pytest.mark.skipif(not INTERPRETED, reason="there the trees are the drafter's")
def test_long_paths_and_one_that_joins(models: Models, apart: Ran, truth: list[list[int]]) -> None:
    given = [jobs(2, 7, 5)[0], replace(jobs(2, 7, 5)[1], arrives=2)]
    truth += [[*job.prompt, *apart.tokens[job.name]] for job in given]
    fed = models.run(given, fed=True)
    assert fed.tokens == apart.tokens
    assert fed.fed > 1
    assert sum(usage.accepted_draft_tokens for usage in fed.usage.values()) > 2


@pytest.mark.skipif(not INTERPRETED, reason="there the trees are the drafter's")
def test_one_without_a_tree_and_one_that_is_cancelled(models: Models, apart: Ran, truth: list[list[int]]) -> None:
    given = [replace(job, budget=budget) for job, budget in zip(jobs(2, 0, 5), (0, 12), strict=True)]
    truth += [[*job.prompt, *apart.tokens[job.name]] for job in given]
    fed = models.run(given, fed=True, cancels={2: "s1"})
    assert fed.finish["s1"] is Finish.CANCELLED
    assert fed.tokens["s1"] == apart.tokens["s1"][: len(fed.tokens["s1"])]
    assert fed.tokens["s0"] == apart.tokens["s0"]
    assert fed.fed > 1


@ON_A_CARD
def test_tokens_are_those_of_steps_that_wait(models: Models) -> None:
    for count, budget in ((1, 7), (1, 0), (4, 7), (8, 16), (32, 7), (3, 63)):
        given = jobs(count, budget, 96)
        apart, fed = models.run(given, fed=False), models.run(given, fed=True)
        assert fed.tokens == apart.tokens, (count, budget)
        assert fed.finish == apart.finish
        assert fed.fed > apart.steps // 2
        accepted = sum(usage.accepted_draft_tokens for usage in fed.usage.values())
        before = sum(usage.accepted_draft_tokens for usage in apart.usage.values())
        assert budget == 0 or accepted > 0.9 * before, "trees got worse"


@ON_A_CARD
def test_sequences_that_come_go_and_are_cancelled(models: Models) -> None:
    given = [replace(job, arrives=5 * n, prompt=prompt(20 + 90 * (n % 3), n)) for n, job in enumerate(jobs(12, 7, 80))]
    cancels = {n: f"s{n % 12}" for n in range(20, 60, 13)}
    apart = models.run(given, fed=False, max_sequences=5, prefill_rows=64)
    fed = models.run(given, fed=True, cancels=cancels, max_sequences=5, prefill_rows=64)
    assert fed.fed > 20
    for name, tokens in fed.tokens.items():
        ended = len(tokens) if fed.finish[name] is Finish.CANCELLED else None
        assert tokens == apart.tokens[name][:ended]
    assert Finish.CANCELLED in fed.finish.values()


@ON_A_CARD
def test_long_outputs_reach_over_pages_and_over_what_is_reserved(models: Models, monkeypatch: Any) -> None:
    monkeypatch.setattr("hedgerow.model.cuda_fed.HORIZON", 100)
    given = jobs(3, 7, 600)
    apart, fed = models.run(given, fed=False), models.run(given, fed=True)
    assert fed.tokens == apart.tokens
    assert fed.finish == apart.finish


def test_every_size_of_trees_is_compiled_before_it_comes(models: Models, monkeypatch: Any) -> None:
    shapes = list[Any]()
    monkeypatch.setattr("hedgerow.model.cuda_fed.prepare_all", lambda what, keys, *more: shapes.extend(keys))
    CudaFed(models.target, models.draft).prepare(5, [0, 7, 63])
    assert {(shape.nodes, shape.sequences) for shape in shapes} >= {(n, q) for n in (0, 8, 63) for q in (1, 4, 8)}
    assert {shape.nodes for shape in shapes} == {0, 8, 16, 32, 63}


def test_what_makes_no_sense_is_refused(models: Models) -> None:
    feed = CudaFed(models.target, models.draft)
    cache = models.target.new_cache(1)
    good = FedMember(5, 3, (0,), Law(0.0, 0, 1.0, 0.0, 0, 0, 4), 30, 20, 0, 0, None)
    behind = models.draft.new_state()
    for bad, what in (
        (good._replace(anchor=-1), "vocabulary"),
        (good._replace(pages=(1,)), "1 pages"),
        (good._replace(budget=64), "0 to 63 nodes"),
        (good._replace(context=behind), "to end at 3"),
    ):
        with pytest.raises(InvalidRequest, match=what):
            feed.enter([bad], cache)
    with pytest.raises(InvalidRequest, match="members"):
        feed.enter([], cache)
