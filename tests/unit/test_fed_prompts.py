"""A prompt beside steps that feed each other: in what order things are launched."""

from __future__ import annotations

from typing import Any

import pytest

from bench.drive import Job, drive_now
from hedgerow.engine.config import EngineConfig
from hedgerow.engine.drafter import DrafterConfig, DrafterEngine
from hedgerow.engine.fed import FedVerifier
from hedgerow.engine.step import LocalDrafter
from hedgerow.engine.types import DraftAnswer, DraftBatch, Sampling
from hedgerow.model.fed import FedLine
from hedgerow.model.interface import Verified
from tests.engine_rig import EOS, VOCABULARY, Rig, prompt
from tests.fed_host import HostFed


class Told(HostFed):
    """What happens, in order."""

    events: list[str]

    def launch(self, asked: Any) -> list[FedLine]:
        self.events.append("step")
        return super().launch(asked)

    def compute(self, *given: Any) -> Verified | None:
        self.events.append("chunk")
        return super().compute(*given)

    def computed(self, launched: Verified) -> Verified:
        self.events.append("kept")
        return super().computed(launched)


class Drafts(LocalDrafter):
    events: list[str]

    def propose(self, batch: DraftBatch) -> DraftAnswer | None:
        self.events.append("sent")
        return super().propose(batch)


def test_the_device_has_its_next_step_before_the_drafter_has_a_chunks_features(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The step that is under way ends meanwhile, and nothing else would be."""
    rig = Rig(tmp_path_factory.mktemp("rig"))
    given = [
        Job("s0", prompt(5), Sampling(max_tokens=60, ignore_eos=True), 7),
        Job("late", prompt(200, 1), Sampling(max_tokens=5), 7, arrives=4),
    ]
    engine = FedVerifier(rig.model, EngineConfig(pages=8, prefill_rows=16), VOCABULARY, EOS)
    feed, drafter = Told(rig.model, rig.draft_model), Drafts(DrafterEngine(rig.draft_model, DrafterConfig()))
    feed.events = drafter.events = events = []
    engine.feed(feed)
    assert drive_now(engine, drafter, given).tokens == rig.plain_all(given)
    beside = events[events.index("chunk") : len(events) - events[::-1].index("chunk")]
    assert beside[:13] == ["chunk", "step", *["kept", "chunk", "step", "sent"] * 2, "kept", "chunk", "step"]
    assert beside.count("sent") > 8
