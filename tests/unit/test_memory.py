"""Memory of the family's members: the published sizes, and the tables in the documents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hedgerow.model import memory
from hedgerow.model.config import K2Config
from hedgerow.weights.published import MINI, MINI_FP8, TRUE, Member, Sizes, config
from hedgerow.weights.rehearse import write
from hedgerow.weights.report import inspect

ROOT = Path(__file__).resolve().parents[2]


def published(member: Member, folder: Path) -> K2Config:
    (folder / "config.json").write_text(json.dumps(config(member, TRUE)))
    return K2Config.from_folder(folder)


def test_the_published_checkpoints_have_these_bytes(tmp_path: Path) -> None:
    """594,205,904,896: the sum over a dump of K2.5's 208,215 text tensors, which others made."""
    for member in ("k2-thinking", "k2.5", "k2.6"):
        c = published(member, tmp_path)  # type: ignore[arg-type]
        assert memory.weights(c, 1) == 594_205_904_896
        assert memory.token(c) == 70_272
    assert memory.weights(c, 8) == 76_183_146_496


def test_a_rank_holds_its_part_and_what_all_hold(tmp_path: Path) -> None:
    c = published("k2.6", tmp_path)
    replicated = 61 * (1536 + 576) * 7168 * 2 + 60 * 384 * 7168 * 2  # projections into the latents, routers
    norms = 61 * (2 * 7168 + 1536 + 512) * 2 + 7168 * 2 + 60 * 384 * 4 + 60 * 384 * 3 * 8
    divided = memory.weights(c, 1) - replicated - norms
    for ranks in (2, 4, 8):
        assert memory.weights(c, ranks) == divided // ranks + replicated + norms
        embedding = 163840 * 7168 * 2  # all of it is on each card
        assert memory.on_card(c, ranks) - memory.weights(c, ranks) == embedding - embedding // ranks


def test_the_tables_of_the_documents_are_what_is_computed(tmp_path: Path) -> None:
    c = published("k2.6", tmp_path)
    page = (ROOT / "docs" / "kimi-k2.md").read_text().splitlines()
    for row in memory.table(c):
        assert row in page, f"docs/kimi-k2.md: {row}"
    sizing = (ROOT / "docs" / "sizing.md").read_text()
    for card in memory.CARDS:
        if f"| 8 x {card.name} |" in sizing:
            row = next(line for line in sizing.splitlines() if line.startswith(f"| 8 x {card.name} |"))
            cells = [cell.strip() for cell in row.split("|")[1:-1]]
            assert cells[1:4] == [
                f"{card.memory / 1e9:.0f} GB", f"{memory.on_card(c, 8) / 1e9:.1f} GB",
                f"{memory.left(c, 8, card) / 1e9:.1f} GB",
            ]  # fmt: skip
            assert int(cells[4].replace(",", "")) == pytest.approx(memory.tokens(c, 8, card), rel=0.005)


@pytest.mark.parametrize(("member", "sizes"), [("k2.6", MINI), ("k2-instruct", MINI_FP8)])
def test_inspect_finds_these_bytes_in_a_folder(tmp_path: Path, member: Member, sizes: Sizes) -> None:
    """It adds up what the files' headers have; here only the configuration is read."""
    write(tmp_path, member, sizes)
    c, needs = K2Config.from_folder(tmp_path), inspect(tmp_path).needs
    assert {need.ranks for need in needs} >= {1, 2, 4, 8}
    for need in needs:
        assert need.weights == memory.weights(c, need.ranks)
        assert need.cache == {card.name: memory.tokens(c, need.ranks, card) for card in memory.CARDS}


def test_what_does_not_fit_has_no_room(tmp_path: Path) -> None:
    c = published("k2-instruct", tmp_path)
    small = memory.CARDS[-1]
    assert memory.left(c, 8, small) < 0
    assert memory.tokens(c, 8, small) == 0
    assert memory.tokens(c, 8, memory.CARDS[0]) == pytest.approx(60_000, rel=0.01)
