"""Steps that feed each other, and the pages of a drafter's context."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bench.drive import Job, drive_now
from hedgerow.engine.config import EngineConfig
from hedgerow.engine.drafter import DrafterConfig, DrafterEngine
from hedgerow.engine.fed import FedVerifier
from hedgerow.engine.step import LocalDrafter
from hedgerow.engine.types import Sampling
from kernels.tree_build import PlainTree
from tests.engine_rig import EOS, VOCABULARY, Rig, prompt
from tests.fed_host import HORIZON, HostFed, Slot


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(tmp_path_factory.mktemp("rig"))


class Knowing(HostFed):
    """Of one sequence: every tree is what follows in its text."""

    text: Sequence[int] = ()

    def _trees(self, asked: Sequence[tuple[Slot, int]]) -> list[PlainTree]:
        super()._trees(asked)
        begins = [(slot.prefix + 1, min(most, self.block - 1)) for slot, most in asked]
        chains = [list(self.text[begin : begin + count]) for begin, count in begins]
        return [PlainTree(c, list(range(-1, len(c) - 1)), [-0.1 * n for n in range(len(c))]) for c in chains]


def test_no_context_grows_beyond_its_pages(rig: Rig) -> None:
    """However many tokens two steps under way add: the line ends before its drafter's pages do."""
    job = Job("s0", prompt(5), Sampling(max_tokens=150, ignore_eos=True), 7)
    feed, plain = Knowing(rig.model, rig.draft_model), rig.plain_all([job])
    feed.text = [*job.prompt, *plain[job.name]]
    engine = FedVerifier(rig.model, EngineConfig(pages=8), VOCABULARY, EOS)
    engine.feed(feed)
    done = drive_now(engine, LocalDrafter(DrafterEngine(rig.draft_model, DrafterConfig())), [job])
    assert done.tokens == plain
    assert done.usage[job.name].accepted_draft_tokens > 120
    assert feed.lines > 150 // HORIZON
