"""A drafter in the verifier's own process: no messages, and its trees are made in the thread that computes the step.

For one machine, and above all for one GPU: nothing is encoded or sent, and the process that waits for the device is the
one that goes on. What it raises costs the step its trees and nothing else. What hangs in it hangs the step, as a
hang of the target does: health says so, whoever watches it ends the process, and its sessions go on elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import cast

from hedgerow.engine.drafter import DrafterConfig, DrafterEngine
from hedgerow.engine.fed import FedVerifier
from hedgerow.engine.step import LocalDrafter
from hedgerow.engine.types import DraftAnswer, DraftBatch
from hedgerow.engine.verifier import VerifierEngine
from hedgerow.model.card import AcceptanceCard
from hedgerow.model.devices import Device
from hedgerow.model.fed import fed_steps
from hedgerow.model.interface import Draft, Prepares, Target, waited
from hedgerow.model.select import Engine, load_drafter
from hedgerow.model.selector import FromPairs, Trees, drafts
from hedgerow.rpc.config import ConfigError, variable_of
from hedgerow.rpc.logs import get_log
from services.verifier.agreement import Described, check
from services.verifier.agreement import Target as Sought
from services.verifier.config import VerifierServiceConfig
from services.verifier.peers import Counters, Patience

MOST_NODES = 63  # of a tree, as in a process of its own
log = get_log(__name__)


class HostedDrafter(LocalDrafter):
    """A DrafterEngine that may fail: `propose` blocks, and raises nothing."""

    def __init__(
        self,
        engine: DrafterEngine,
        described: Described,
        patience: Patience | None = None,
        waited: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.monotonic,
        model: Draft | None = None,
    ) -> None:
        super().__init__(engine)
        self.model = model  # that the engine drafts with, for steps that feed each other
        self.described, self.waited, self.counters = described, waited, Counters(connected=1)
        self._patience, self._clock = patience or Patience(), clock
        self._penalty, self._not_before = self._patience.penalty, 0.0

    @property
    def connected(self) -> bool:
        """Whether it is asked: not while it is left alone after a failure."""
        return self._clock() >= self._not_before

    def check(self, target: Sought) -> None:
        """Raises Disagreement unless it was made for `target`."""
        check(self.described, target)

    def propose(self, batch: DraftBatch) -> DraftAnswer | None:
        """The step's trees; None after a failure, and for a while after it."""
        if not self.connected:
            self.counters.unasked += 1
            return None
        try:
            answer = self.engine.draft(self._within(batch))
        except Exception as error:  # noqa: BLE001  whatever a drafter does, decoding goes on
            self.counters.failed += 1
            log.error("the drafter failed; decoding goes on without it", exception=error, pause=self._penalty)
            self.engine.drop_all()  # what it holds may be half of something
            self._not_before = self._clock() + self._penalty
            self._penalty = min(2 * self._penalty, self._patience.most_penalty)
            return None
        self._penalty = self._patience.penalty
        self.counters.answered += 1
        return answer

    def made(self) -> None:
        self.counters.answered += 1

    def _within(self, batch: DraftBatch) -> DraftBatch:
        most = self.engine.config.max_budget
        if all(work.budget <= most for work in batch.works):
            return batch
        return replace(batch, works=[replace(work, budget=min(work.budget, most)) for work in batch.works])


def load_hosted(config: VerifierServiceConfig) -> HostedDrafter:
    """Reads the drafter's checkpoint. Blocks; raises HedgerowError with file and field, ConfigError with the variable.

    DFlash alone, of hidden states.
    """
    if config.drafter_path is None:
        raise ConfigError(variable_of("drafter_path"), "nothing", "it must be set where drafter is in-process")
    model = load_drafter(
        config.drafter_path, config.model_path, cast(Engine, config.engine), config.threads_used,
        device=cast(Device, config.device), amplitude=config.yarn_amplitude,
    )  # fmt: skip
    limits = DrafterConfig(config.max_sequences, min(config.max_budget, MOST_NODES))
    card = AcceptanceCard.from_folder(config.drafter_path, model.vocab_size)
    made = drafts(model, config.drafter_path, cast(Trees, config.trees))
    if config.trees == "conditional" and not isinstance(made, FromPairs):
        raise ConfigError(variable_of("trees"), config.trees, f"{config.drafter_path} has no selector")
    if isinstance(model, Prepares):  # so that no request waits for a compiler; by now it knows of which trees
        model.prepare(limits.max_sequences, limits.max_budget)
    alone = model if made is model else None  # steps that feed each other have trees of marginals
    engine, said = DrafterEngine(made, limits), _described(model, limits, card)
    return HostedDrafter(engine, said, waited=lambda: waited(model), model=alone)


def feed(engine: VerifierEngine, model: Target, hosted: HostedDrafter) -> bool:
    """Lets the engine's steps feed each other where both models are on one GPU, and says whether they do. Blocks while
    such steps are recorded."""
    if not isinstance(engine, FedVerifier) or hosted.model is None:
        return False
    steps, config = fed_steps(model, hosted.model), engine.config
    if steps is None:
        return False
    if config.auto_budget:
        log.warning(
            "requests whose budgets are chosen have steps that wait for each other", auto_budget=config.auto_budget
        )
    budgets = {0, config.default_budget, hosted.described.block_size - 1, config.max_budget}
    steps.prepare(config.max_sequences, sorted(min(budget, config.max_budget) for budget in budgets))
    engine.feed(steps)
    return True


def _described(model: Draft, limits: DrafterConfig, card: AcceptanceCard | None) -> Described:
    c = model.config
    return Described(
        vocab_size=model.vocab_size,
        feature_layers=tuple(model.feature_layers),
        feature_width=model.feature_width,
        max_sequences=limits.max_sequences,
        head_hash=model.target_head_hash,
        block_size=model.block_size,
        max_budget=limits.max_budget,
        hidden_size=c.hidden_size,
        layers=c.num_target_layers or 0,
        rope_theta=c.rope.theta,
        mask_token=c.mask_token_id,
        checkpoint_hash=model.checkpoint_hash,
        card=card,
    )
