"""Steps whose acceptance feeds the next one on the device: what the engine asks of a target and a drafter for that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from hedgerow.model.batch import SequenceRows
from hedgerow.model.interface import Context, Draft, Target, Verified
from kernels.sample import Law
from kernels.tree_accept import WalkRows


class FedMember(NamedTuple):
    """A sequence as it enters; from then on the device knows where it stands."""

    anchor: int
    prefix: int  # the anchor's position
    pages: Sequence[int]  # of the target's cache: all that it can ever need
    law: Law  # of the token behind the anchor
    limit: int  # as SequenceRows.limit
    last: int  # the last anchor's position: behind it the device computes nothing for it
    budget: int  # most nodes of its tree
    cap: int  # most tokens at one depth of it; 0: any number
    context: Context | None  # the drafter's, all positions before the anchor; None: it has no trees


class FedLine(NamedTuple):
    """What a step did for one member. The tree was verified before anybody looked at it."""

    tokens: Sequence[int]  # of its tree's nodes
    parents: Sequence[int]  # -1: the anchor
    logprobs: Sequence[float]
    path: Sequence[int]  # rows, the anchor's 0; empty: the device computed nothing for it
    bonus: int


class FedSteps(Protocol):
    """One line of steps over the same members at a time. Not safe for use by several threads.

    `launch` does not wait for the device, and may be called before the last AHEAD - 1 steps are collected: each begins
    where the one before it will end. Steps are collected in their order, or never.
    """

    @property
    def block(self) -> int:
        """Most tokens that a step with trees adds to a sequence."""
        ...

    @property
    def most_nodes(self) -> int:
        """Of a tree."""
        ...

    @property
    def most_members(self) -> int: ...
    @property
    def positions(self) -> int:
        """That the drafter can stand at."""
        ...

    @property
    def stale(self) -> bool:
        """Whether what was entered does not fit the models any more. It must be entered anew, and nothing launched."""
        ...

    def prepare(self, sequences: int, budgets: Sequence[int]) -> None:
        """Compiles the steps of up to `sequences` members; records those whose members all have one of the budgets."""
        ...

    def enter(self, members: Sequence[FedMember], cache: Any) -> Sequence[int]:
        """Sends what is known of the members. For each the position up to which its drafting context has room: that
        of its last anchor, or HORIZON behind this one. InvalidRequest for what makes no sense."""
        ...

    def suits(self, asked: Sequence[int]) -> bool:
        """Whether a step of such trees has room for them, and is not made for many more."""
        ...

    def launch(self, asked: Sequence[int]) -> Any:
        """The next step: most nodes of each member's tree, -1: it is out of it from now on. For `collect`."""
        ...

    def collect(self, launched: Any) -> list[FedLine]:
        """Waits for a step. A line for each member."""
        ...

    def compute(self, rows: Sequence[SequenceRows], cache: Any, trees: Sequence[WalkRows] = ()) -> Any | None:
        """Launches chunks of prompts behind the last step: for `computed`, before there are others. `trees`: of a row
        each, those that have logits. None where more room is needed than there is. InvalidRequest as `forward`."""
        ...

    def computed(self, launched: Any) -> Verified:
        """Waits for them, and not for steps behind them. The features are on the host until the next are launched.
        ValueError as `walk`."""
        ...

    def leave(self, ends: Sequence[int]) -> None:
        """After the last step that was collected: appends to the drafting contexts what it accepted. `ends`: of each
        member the positions before which its context is right then."""
        ...


HORIZON = 1024  # positions whose pages of a drafting context are taken at once
AHEAD = 2  # steps that are launched and not read, at most


def fed_steps(target: Target, draft: Draft) -> FedSteps | None:
    """For models on one GPU that have such steps; None for others."""
    try:
        from hedgerow.model.cuda import CudaK2  # needs triton
        from hedgerow.model.cuda_dflash import CudaDFlash
        from hedgerow.model.cuda_fed import CudaFed
    except ImportError:
        return None
    if type(target) is not CudaK2 or type(draft) is not CudaDFlash:  # not ranks, which step together
        return None
    return CudaFed(target, draft) if CudaFed.serves(target, draft) else None
