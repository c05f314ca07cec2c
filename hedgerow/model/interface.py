"""What the engines ask of a target and of a drafter, whichever engine computes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from hedgerow.errors import InvalidRequest
from hedgerow.model.batch import ForwardOutput, SequenceRows
from hedgerow.model.config import K2Config
from hedgerow.model.draft_config import DraftConfig
from kernels.tree_accept import Walked, WalkRows
from kernels.tree_build import PlainTree


class Cache(Protocol):
    """A paged latent cache; a flat slot is page * page_size + offset."""

    @property
    def page_size(self) -> int: ...
    @property
    def pages(self) -> int: ...
    def copy(self, src_slots: Sequence[int], dst_slots: Sequence[int]) -> None: ...


class Target(Protocol):
    """K2Model, CompiledK2 or CudaK2. A cache serves the model that made it."""

    @property
    def config(self) -> K2Config: ...
    @property
    def checkpoint_hash(self) -> str: ...
    @property
    def kernel_law(self) -> str: ...
    @property
    def architecture(self) -> str: ...
    @property
    def feature_layers(self) -> tuple[int, ...]: ...
    @property
    def feature_width(self) -> int: ...
    def new_cache(self, pages: int) -> Cache: ...
    def forward(self, rows: Sequence[SequenceRows], cache: Any) -> ForwardOutput:
        """Logits may be on a device. The next call may overwrite both parts; where logits are wanted, features may be
        on their way until `walk` has returned."""
        ...

    def walk(self, logits: torch.Tensor, trees: Sequence[WalkRows]) -> list[Walked]: ...


class Verified(NamedTuple):
    """What `WholeSteps.verify` found. The next call may overwrite the features."""

    walked: list[Walked]
    features: torch.Tensor  # as in ForwardOutput


@runtime_checkable
class WholeSteps(Protocol):
    """A target that has a step of trees, and of prompts beside them, in one pass: `forward`, `walk` and the moves of
    what was accepted."""

    def verify(self, rows: Sequence[SequenceRows], cache: Any, trees: Sequence[WalkRows]) -> Verified:
        """Row for row, the first of `rows` are `trees`; behind these are chunks of prompts, of which nothing is drawn.
        Accepted rows' latents are in their places in the cache on return, also of what the caller then cuts.
        ValueError as `walk`."""
        ...


@runtime_checkable
class Sharded(Protocol):
    """A target whose sums are made of so many parts, one rank's each."""

    @property
    def shards(self) -> int: ...


def shards(model: object) -> int:
    """Parts of a model's sums; 1 for a model that is not divided."""
    return model.shards if isinstance(model, Sharded) else 1


@runtime_checkable
class Prepares(Protocol):
    """A model on a device: slow where it meets a new shape of step, and able to meet them before anybody waits."""

    @property
    def waited(self) -> float:
        """Seconds in all that it has waited for its device."""
        ...

    def prepare(self, sequences: int, each: int, prompt_rows: int = 0) -> None:
        """Blocks until steps of up to so many sequences and rows of prompts are compiled and recorded. `each`: rows of
        a tree that a target verifies, nodes of one that a drafter makes."""
        ...


def waited(model: object) -> float:
    """Seconds in all that `model` has waited for a device; on a CPU there is none."""
    return model.waited if isinstance(model, Prepares) else 0.0


@runtime_checkable
class Among(Protocol):
    """A model that other devices share: the cache must fit on each of them."""

    least_free: int | None  # bytes of the fullest of the others, once its weights are there; None: nobody said


def least_free(model: object) -> int | None:
    """As `Among.least_free`; None of a model that is alone."""
    return model.least_free if isinstance(model, Among) else None


@runtime_checkable
class Routes(Protocol):
    """A target that knows which experts its rows went to."""

    def experts(self) -> float | None:
        """Distinct experts of the last step, the mean of its layers that have experts; None where that is not known,
        since this step was not counted."""
        ...


def experts_of(model: object) -> Callable[[], float | None]:
    """As `Routes.experts`; None each time of a model that does not know."""
    return model.experts if isinstance(model, Routes) else lambda: None


@runtime_checkable
class Records(Protocol):
    """A target whose steps of a new shape are compiled and recorded before they are repeated."""

    @property
    def made(self) -> int:
        """Launches so far that were not repetitions: they take many times as long."""
        ...


def made_of(model: object) -> Callable[[], int]:
    """As `Records.made`; 0 of a model that records nothing."""
    return (lambda: model.made) if isinstance(model, Records) else lambda: 0


@runtime_checkable
class Taps(Protocol):
    """A target whose feature layers can be changed between two steps."""

    def tap(self, layers: Sequence[int]) -> None:
        """From the next step on features are the outputs of these layers, as many as before. On a device steps are
        recorded anew. InvalidRequest for others."""
        ...


def checked_taps(layers: Sequence[int], before: Sequence[int], depth: int) -> tuple[int, ...]:
    """InvalidRequest unless they are as many as `before`, of a target with `depth` layers."""
    if len(layers) != len(before) or not all(0 <= layer < depth for layer in layers):
        raise InvalidRequest("feature_layers", list(layers), f"{len(before)} of the target's {depth} layers")
    return tuple(layers)


class Context(Protocol):
    """What a drafter holds of one sequence: positions start .. end - 1."""

    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    def reset(self, position: int) -> None: ...


class Draft(Protocol):
    """DFlashModel, CompiledDFlash or CudaDFlash. A context serves the model that made it."""

    @property
    def config(self) -> DraftConfig: ...
    @property
    def checkpoint_hash(self) -> str: ...
    @property
    def target_head_hash(self) -> str: ...
    @property
    def feature_layers(self) -> tuple[int, ...]: ...
    @property
    def feature_width(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    def new_state(self) -> Context: ...
    def append(self, state: Any, features: torch.Tensor, position: int) -> None: ...
    def draft(self, states: Sequence[Any], anchors: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """May be on a device. The next call may overwrite it."""
        ...

    def draft_states(
        self, states: Sequence[Any], anchors: Sequence[int], positions: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `draft`, and the normed states that the logits are of."""
        ...

    def trees(self, logits: torch.Tensor, budgets: Sequence[int], caps: Sequence[int]) -> list[PlainTree]: ...
