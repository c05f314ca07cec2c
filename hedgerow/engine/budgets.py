"""Each step's budgets where nobody fixed them: what brings most tokens a second of the whole batch, as measured.

What a step takes is learned from steps (step_times.py), what a tree brings from trees (curves.py). A choice is greedy
by price: all sequences take the nodes that bring at least so many tokens each, for a ladder of such prices; the price
whose tokens over predicted milliseconds are highest is taken, and plain decoding is one of them.

What is not tried cannot be known to have changed, so now and then a step tries something else. What that may lose is
bounded: SHARE of the time, as a credit that grows with every step and that a trial's measured loss is taken from, and
less of it the more trials of trees were in vain. A trial that wins costs nothing, and so one may follow at once.

Nothing here can change a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hedgerow.engine.curves import NEWS, SharedCurve, hull, sizes
from hedgerow.engine.scheduler import Work
from hedgerow.engine.sequence import AttachedSequence
from hedgerow.engine.step_times import Load, StepTimes
from hedgerow.engine.tree import TreeConfig

SHARE = 0.007  # of the time, that trials may lose
VAIN = 4  # trials of trees in a row that brought nothing, after which trials may lose a third of SHARE
SAVED = 8.0  # most steps' time that the credit may hold
FIRST = (8, 0, 4, 16, 0, 8, 2, 0)  # budgets of the first steps with about so many sequences
FEWER = (8, 0, 4, 0)  # where steps can be predicted, if not drafts: what is chosen from is seen once, no trees twice
PAUSE = 12  # least steps between two trials of which the first won nothing
SCOUT = 4  # nodes of the one tree that is tried where several sequences decode plainly
AGAIN, SOON, RARELY = 7, 3, 64  # steps for which a choice stands: one sequence's, several's, and that of no trees
LASTING = 32  # steps with trees that share what it costs to feed a drafter that was left
WORTH = 1.03  # times plain decoding's rate: less is not worth a tree
PRICES = (0.6, 0.45, 0.34, 0.26, 0.2, 0.15, 0.11, 0.08, 0.06, 0.04, 0.025)  # tokens a node
NEVER = float("inf")


class Option(NamedTuple):
    """Budgets of the sequences that are chosen for, in their order, and what they are expected to bring and take."""

    budgets: Sequence[int]
    tokens: float  # of the whole batch
    ms: float = 0.0
    feeding: float = 0.0  # milliseconds, once: what came while its sequences had no trees goes to the drafter first

    @property
    def rate(self) -> float:
        return self.tokens / (self.ms + self.feeding / LASTING) if self.ms > 0 else 0.0

    def lost(self, rate: float) -> float:
        """Milliseconds that one such step takes longer than its tokens do at `rate`."""
        return self.ms + self.feeding - self.tokens / rate


class Fixed(NamedTuple):
    """The part of the batch that is not chosen for."""

    sequences: int
    rows: int
    keys: int  # of the whole batch
    drafts: int
    nodes: int
    tokens: float


class Budgets:
    """Chooses, and learns. `most`: nodes of a tree whose budget is chosen. Not safe for use by several threads."""

    def __init__(self, times: StepTimes, most: int) -> None:
        self._times, self._sizes = times, sizes(most)
        self.shared = (SharedCurve(most), SharedCurve(most))  # greedy, sampled
        self.trials = 0
        self.speculates = True  # whether the newest choice had a tree
        self._credit = self._pause = 0.0
        self._vain = 0  # newest trials of trees that brought nothing, VAIN at most
        self._turn = self._stands = self._paid = 0
        self._last: tuple[list[int], Option] | None = None  # by the numbers of its sequences
        self._begun: dict[int, int] = {}  # first steps by kind of batch
        self.trying = False  # whether the present step is a trial
        self._plain = False  # whether the best choice is plain decoding
        self._worth = 0.0  # what the present trial is expected to lose, in milliseconds
        self._rate = 0.0  # tokens a millisecond of the best choice
        self._ours = False  # whether the present step has budgets that are chosen
        self._feeding = self._bare = 0.0  # of the present trial: milliseconds; the tokens of plain decoding
        self._price = 0.0  # what the cheapest trial is expected to lose; in milliseconds

    def choose(self, works: Sequence[Work]) -> list[Work]:
        """The decoding sequences' works with the budgets of this step; those that a request fixed stay."""
        free = [work for work in works if work.sequence.curve is not None and work.budget]
        self.trying, self._ours = False, bool(free)
        if not free:
            return list(works)
        if self._rests(len(works)):
            return [Work(*work[:4], 0, *work[5:]) if work.sequence.curve is not None else work for work in works]
        option = self._option(works, free)
        self.speculates = any(option.budgets)
        chosen = iter(option.budgets)
        return [
            _with(work, next(chosen)) if work.sequence.curve is not None and work.budget else work for work in works
        ]

    def verified(self, sequence: AttachedSequence, budget: int, accepted: Sequence[int]) -> None:
        """The target has seen a tree of the sequence: these nodes, counted from 0, were accepted."""
        rare = self.trying and self._plain
        self.shared[sequence.start.sampling.temperature > 0].saw(budget, accepted, NEWS if rare else 0.0)
        if sequence.curve is not None:
            sequence.curve.saw(budget, accepted)

    def took(self, tokens: int, ms: float) -> None:
        """The step of the newest choice took `ms`, from its plan to the next, and brought `tokens`."""
        if not (self._rate and self._ours):  # steps in which nothing is chosen pay for no trial
            return
        if not self.trying:
            share = SHARE / (1 + 2 * self._vain / VAIN) if self._plain else SHARE
            self._credit = min(self._credit + share * ms, SAVED * ms)
            self._pause -= 1
            return
        fed = self._feeding if tokens > self._bare else 0.0  # once, if trees are good: no loss of this one's
        lost = ms - fed - tokens / self._rate
        # what one step shows is mostly noise, unless it shows far more than was expected
        owed = max(self._worth - fed, lost if lost > ms / 2 else 0.0, 0.0)
        # nor does a machine that stood still once forbid trials for an hour
        self._credit -= min(owed, max(self._worth, SAVED * self._bare / self._rate))
        self._pause = PAUSE if lost > 0 else 0
        self._vain = min(self._vain + 1, VAIN) if lost > 0 and self._plain else 0

    def _rests(self, sequences: int) -> bool:
        """Whether plain decoding, as chosen for about so many sequences, stands for this step too."""
        if not (self._plain and self._stands > 0 and self._last is not None) or self._due():
            return False
        if self._last[0][0] != sequences.bit_length():
            return False
        self._stands -= 1
        self.speculates = False
        return True

    def _option(self, works: Sequence[Work], free: Sequence[Work]) -> Option:
        first = self._first(len(works))
        if first is not None:
            self._last = None
            return Option([min(first, work.budget) for work in free], 0.0)
        if (
            self._last is not None
            and self._stands > 0
            and not self._plain
            and self._last[0] == self._whose(works, free)
        ):
            self._stands -= 1
            return self._last[1]
        best = self._best(works, free)
        self._last = None if self.trying else (self._whose(works, free), best)
        self._stands = RARELY if self._plain else SOON if len(works) > 1 else AGAIN
        return best

    def _whose(self, works: Sequence[Work], free: Sequence[Work]) -> list[int]:
        """Whom the choice is for. Without trees nothing is learned of them: none is the choice for all who come."""
        return [len(works).bit_length()] if self._plain else [work.sequence.number for work in free]

    def _due(self) -> bool:
        """Whether a trial can be paid, where there are no trees."""
        return self._plain and self._pause <= 0 and self._credit >= self._price

    def _first(self, sequences: int) -> int | None:
        """Batches of a new size are tried out before they are reckoned with."""
        near, opening = sequences.bit_length(), FEWER if self._times.expected else FIRST
        begun = self._begun.get(near, 0)
        if begun == len(opening):
            return None
        self._begun[near] = begun + 1
        return opening[begun]

    def _best(self, works: Sequence[Work], free: Sequence[Work]) -> Option:
        fixed = self._fixed(works, free)
        options = self._options(free)
        waiting = [_waiting(work) for work in free]
        plain = best = self._reckoned(options[0], fixed, waiting)
        found = [plain]
        for option in options[1:]:
            option = self._reckoned(option, fixed, waiting)
            option = option._replace(ms=max(option.ms, plain.ms))  # a tree is never for nothing, whatever times say
            found.append(option)
            if option.rate > best.rate:
                best = option
        if best.rate < WORTH * plain.rate:
            best = plain
        self._rate, self._plain = best.rate, best is plain
        return self._tried(found, best, free, fixed)

    def _tried(self, found: Sequence[Option], best: Option, free: Sequence[Work], fixed: Fixed) -> Option:
        """`best`, or something else where its turn has come and its loss can be paid."""
        if self._pause > 0 or not best.rate:
            return best
        others = [option for option in found if option is not best]
        if best is found[0]:  # whether trees pay: a small one hardly shows it, and with one sequence it costs least
            others = [option for option in others if max(option.budgets) >= SCOUT]
            if len(free) > 1:
                others.append(self._reckoned(self._scout(free), fixed, [_waiting(work) for work in free]))
        others.sort(key=lambda option: option.lost(best.rate))
        cheapest = others[0].lost(best.rate) if others else NEVER
        self._price = (
            min(cheapest, SAVED / 2 * best.ms) if others else NEVER
        )  # so much can be saved up; the rest is owed
        if self._credit < self._price:
            return best
        paid = sum(option.lost(best.rate) <= self._credit for option in others)
        other = others[self._turn % max(paid, 1)]
        self._worth = min(other.lost(best.rate), max(self._credit, 0.0))  # what it does lose is known afterwards
        self._feeding, self._bare = other.feeding, found[0].tokens
        self._turn += 1
        self.trials += 1
        self.trying = True
        return other

    def _scout(self, free: Sequence[Work]) -> Option:
        """One tree, of the sequence of which the drafter lacks least."""
        at = min(range(len(free)), key=lambda i: _waiting(free[i]))
        sequence, size = free[at].sequence, min(SCOUT, free[at].budget)
        budgets = [0] * len(free)
        budgets[at] = size
        brings = self._curve(sequence).expected(sequence.curve, (0, size))
        return Option(budgets, brings[1] + len(free) - 1)

    def _options(self, free: Sequence[Work]) -> list[Option]:
        """Plain decoding first; then every budget of one sequence, or every price of several."""
        options = [Option([0] * len(free), float(len(free)))]
        if len(free) == 1:
            work = free[0]
            within = self._within(work.budget)
            tokens = self._curve(work.sequence).expected(work.sequence.curve, within)
            return options + [Option([size], brings) for size, brings in zip(within[1:], tokens[1:], strict=True)]
        corners = [self._corners(work) for work in free]
        at = [0] * len(free)
        for price in PRICES:
            for i, mine in enumerate(corners):
                while at[i] + 1 < len(mine) and mine[at[i] + 1][0] >= price:
                    at[i] += 1
            budgets = [mine[j][1] for mine, j in zip(corners, at, strict=True)]
            if budgets != options[-1].budgets:
                options.append(Option(budgets, sum(mine[j][2] for mine, j in zip(corners, at, strict=True))))
        return options

    def _corners(self, work: Work) -> list[tuple[float, int, float]]:
        within = self._within(work.budget)
        return hull(within, self._curve(work.sequence).expected(work.sequence.curve, within))

    def _within(self, most: int) -> tuple[int, ...]:
        return self._sizes if most >= self._sizes[-1] else sizes(most)

    def _curve(self, sequence: AttachedSequence) -> SharedCurve:
        return self.shared[sequence.start.sampling.temperature > 0]

    def _fixed(self, works: Sequence[Work], free: Sequence[Work]) -> Fixed:
        keys = sum(work.prefix for work in works)
        if len(free) == len(works):
            return Fixed(0, 0, keys, 0, 0, 0.0)
        ours = {work.sequence.number for work in free}
        budgets = [work.budget for work in works if work.sequence.number not in ours]
        rows = sum(TreeConfig(budget).q_len for budget in budgets)
        tokens = 0.0
        for work in works:
            if work.sequence.number not in ours:
                within = self._within(min(work.budget, self._sizes[-1])) if work.budget else (0,)
                tokens += self._curve(work.sequence).expected(None, within)[-1]
        return Fixed(len(budgets), rows, keys, sum(b > 0 for b in budgets), sum(budgets), tokens)

    def _reckoned(self, option: Option, fixed: Fixed, waiting: Sequence[int]) -> Option:
        """With what it takes. Of trees that grow step after step, features are fed as many as tokens come."""
        nodes = sum(option.budgets)
        drafts = fixed.drafts + sum(budget > 0 for budget in option.budgets)
        tokens = option.tokens + fixed.tokens
        load = Load(
            fixed.sequences + len(option.budgets), fixed.rows + nodes + len(option.budgets), fixed.keys, drafts,
            fixed.nodes + nodes, round(tokens) if drafts else 0,
        )  # fmt: skip
        fed = sum(rows for rows, budget in zip(waiting, option.budgets, strict=True) if budget)
        feeding = self._times.feeding(max(fed - round(option.tokens), 0))
        return Option(option.budgets, tokens, self._times.milliseconds(load), feeding)


def _waiting(work: Work) -> int:
    ring = work.sequence.features
    return ring.waiting if ring is not None else 0


def _with(work: Work, budget: int) -> Work:
    """`_replace` takes three times as long, which counts where every sequence of every step has it."""
    return Work(work.sequence, work.phase, work.prefix, work.rows, min(work.budget, budget), work.room, work.feed)
