"""A row's bits on a device whose products have tiles by the number of rows: what the check at load finds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from hedgerow.model.batch import ForwardOutput, SequenceRows
from hedgerow.model.k2 import K2Model
from hedgerow.model.selfcheck import SelfCheckFailed, check_rows
from tests.tiny import TinyTarget, write_tiny


class OnACard:
    """A model whose logits are off by the last bit in some steps."""

    def __init__(self, model: K2Model, wrong: Callable[[int], bool]) -> None:
        self.model, self.wrong = model, wrong
        self.seen = list[int]()

    architecture = "cuda-sm100"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, rows: Sequence[SequenceRows], cache: Any) -> ForwardOutput:
        out, count = self.model.forward(rows, cache), sum(len(part.tokens) for part in rows)
        self.seen.append(count)
        return out._replace(logits=out.logits.nextafter(out.logits + 1)) if self.wrong(count) else out


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> K2Model:
    return K2Model.load(write_tiny(tmp_path_factory.mktemp("tiny"), TinyTarget()).target, ())


def test_rows_alone_and_in_crowds_are_compared(model: K2Model) -> None:
    card = OnACard(model, lambda count: False)
    check_rows(card)  # type: ignore[arg-type]
    assert 1 in card.seen
    assert max(card.seen) > 128


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda count: count == 1, "others has other bits than the row alone"),
        (lambda count: count > 128, "others has other bits than the row alone"),
        (lambda count: count in (1, 151), "a row with a tree has other bits than the row alone"),
        (lambda count: count == 7, "a row in a tree has other bits than the row alone"),
    ],
)
def test_bits_that_depend_on_the_number_of_rows_are_found(
    model: K2Model, wrong: Callable[[int], bool], told: str
) -> None:
    with pytest.raises(SelfCheckFailed, match=told):
        check_rows(OnACard(model, wrong))  # type: ignore[arg-type]


def test_on_a_cpu_no_crowd_is_computed(model: K2Model, monkeypatch: pytest.MonkeyPatch) -> None:
    card = OnACard(model, lambda count: False)
    monkeypatch.setattr(OnACard, "architecture", "cpu-compiled")
    check_rows(card)  # type: ignore[arg-type]
    assert max(card.seen) <= 70
