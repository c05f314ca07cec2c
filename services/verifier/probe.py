"""Whether the drafter drafts as well as its maker measured: one greedy generation, once it is connected. One without
a card is tried against the layers beside its own (neighbours.py).

A drafter that is fed features of other layers than it was made for, or that has another rotary embedding, gives as many
trees and worse ones. No token changes and nothing fails; only its acceptance tells.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from hedgerow.engine.types import Finish, Sampling, Start, StepResult, Update
from hedgerow.errors import HedgerowError
from hedgerow.model.card import AcceptanceCard
from hedgerow.rpc.logs import get_log
from services.verifier.agreement import Described
from services.verifier.neighbours import Tried

SESSION = "acceptance-probe"
LEAST_PRIORITY = -100  # whoever waits goes first
LEAST_STEPS = 4  # with trees, for a judgement
log = get_log(__name__)


class Engine(Protocol):
    """The part of VerifierEngine that a probe uses."""

    def start(self, start: Start) -> None: ...
    def committed(self, session_id: str, epoch: int, attempt: int, offset: int) -> None: ...


class Measured(NamedTuple):
    """Tokens a decode step with a tree, and what is expected: by the drafter's card, or by its neighbours' layers."""

    per_step: float
    expected: float

    @property
    def ratio(self) -> float:
        return self.per_step / self.expected


class AcceptanceProbe:
    """Runs a card's generation through the engine beside everything else. `least`: share of the card's acceptance below
    which it warns; 0: it does not run. Drafters are told apart by their checkpoints, and each is measured once."""

    def __init__(self, engine: Engine, least: float) -> None:
        self._engine, self._least = engine, least
        self._card: AcceptanceCard | None = None  # of the generation that runs
        self._known: set[str] = set()
        self._tokens = self._steps = self._offset = 0
        self.measured: Measured | None = None
        self.said = ""

    def connected(self, drafter: Described) -> bool:
        """A drafter that fits is there. True: a generation was begun."""
        if not self._least or self._card is not None or drafter.checkpoint_hash in self._known:
            return False
        card = drafter.card
        if card is None:
            self.said = "not measured: the drafter has no card"
            return False
        sampling = Sampling(max_tokens=card.tokens, ignore_eos=True)
        attempt = len(self._known) + 1
        start = Start(
            SESSION, 1, attempt, card.prompt, sampling, budget=card.budget, topk_cap=card.topk_cap,
            priority=LEAST_PRIORITY,
        )  # fmt: skip
        try:
            self._engine.start(start)
        except HedgerowError as error:  # a smaller context than the card's, a full queue
            self.said = f"not measured: {error.message}"
            log.info("the drafter's acceptance is not measured", why=error.message)
            return False
        self._known.add(drafter.checkpoint_hash)
        self._card, self._tokens, self._steps, self._offset = card, 0, 0, 0
        return True

    def lacks_card(self, drafter: Described) -> bool:
        """Whether there is nothing to compare this one with, and that is news."""
        return bool(self._least) and drafter.card is None and drafter.checkpoint_hash not in self._known

    def tried(self, drafter: Described, tried: Tried) -> None:
        """Judges a drafter without a card by its neighbours' layers."""
        self._known.add(drafter.checkpoint_hash)
        by, best = tried.best
        self.measured = Measured(tried.per_step, max(best, tried.per_step))
        where = f"{abs(by)} {'below' if by < 0 else 'above'}"
        self.said = f"{tried.per_step:.2f} tokens a step, {best:.2f} from the layers {where}; the drafter has no card"
        if self.measured.ratio >= self._least:
            log.info("the drafter drafts best from its layers", tokens_per_step=tried.per_step, beside=tried.beside)
            return
        self.said = f"LOW: {self.said}"
        log.warning(
            "the drafter drafts better from its layers' neighbours: are the ids those of its training, counted from 0?",
            feature_layers=list(drafter.feature_layers),
            better=[layer + by for layer in drafter.feature_layers],
            tokens_per_step=round(tried.per_step, 3),
            from_those=round(best, 3),
            least=self._least,
        )

    def seen(self, result: StepResult) -> None:
        """Takes a step's result; most have nothing for it."""
        if self._card is None:
            return
        for update in result.updates:
            if update.session_id == SESSION:
                self._take(update)

    def _take(self, update: Update) -> None:
        assert self._card is not None
        self._offset += len(update.tokens)
        self._engine.committed(SESSION, update.epoch, update.attempt, self._offset)
        if update.stats is not None and update.stats.tree_nodes:  # a step without a tree says nothing of it
            self._tokens, self._steps = self._tokens + update.stats.emitted, self._steps + 1
        if update.finish is not Finish.NONE:
            card, self._card = self._card, None
            self._judge(card.tokens_per_step, update.finish)

    def _judge(self, expected: float, finish: Finish) -> None:
        if finish is not Finish.LENGTH or self._steps < LEAST_STEPS:
            self.said = f"not measured: {self._steps} steps with trees, ended with {finish.name.lower()}"
            return
        self.measured = found = Measured(self._tokens / self._steps, expected)
        self.said = f"{found.per_step:.2f} tokens a step, its card says {expected:.2f}"
        if found.ratio >= self._least:
            log.info("the drafter's acceptance is as its card says", tokens_per_step=found.per_step, card=expected)
            return
        self.said = f"LOW: {self.said}"
        log.warning(
            "the drafter's acceptance is below its card's: are these its target's layers, counted from 0, and its "
            "rotary embedding?",
            tokens_per_step=round(found.per_step, 3),
            card=round(expected, 3),
            least=self._least,
        )
