"""Ids to text, piece by piece: characters stay whole, possible stops are held back, offsets do not depend on cuts."""

from __future__ import annotations

import random

import pytest

from services.gateway.detokenizer import Detokenizer

BYTE = [bytes([i]) for i in range(256)]  # token i is the byte i
PIECES = [*BYTE, b"", b"END", b"\xe4\xbd\xa0\xe5", b"\xa5\xbd", b"xEN", b"D!"]
CONTROL, END, NI, HAO, XEN, D = range(256, 262)


def run(tokens: list[int], stop: tuple[str, ...] = (), matched: str = "", cuts: int = 1) -> str:
    text = Detokenizer(PIECES, stop)
    parts = [text.feed(tokens[i : i + cuts]) for i in range(0, len(tokens), cuts)]
    whole = "".join([*parts, text.finish(matched)])
    assert text.text_offset == len(whole.encode())
    return whole


def test_a_character_is_released_whole_and_once() -> None:
    text = Detokenizer(PIECES)
    assert [text.feed([NI]), text.feed([HAO]), text.finish()] == ["你", "好", ""]
    assert text.text_offset == 6


def test_an_unfinished_character_at_the_end_is_one_replacement() -> None:
    text = Detokenizer(PIECES)
    assert [text.feed([NI]), text.text_offset, text.finish(), text.text_offset] == ["你", 3, "\ufffd", 6]


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"\xff", "\ufffd"),
        (b"a\xe4\xbdb", "a\ufffdb"),  # a cut character is one replacement, not one for each byte
        (b"\xc0\xaf", "\ufffd\ufffd"),  # overlong
        (b"\xed\xa0\x80", "\ufffd\ufffd\ufffd"),  # a surrogate
        (b"\xf0\x9f\x98\x80\x80", "😀\ufffd"),
    ],
)
def test_invalid_utf8_is_replaced_alike_however_it_is_cut(data: bytes, shown: str) -> None:
    assert data.decode("utf-8", "replace") == shown
    for cuts in range(1, len(data) + 1):
        assert run(list(data), cuts=cuts) == shown


def test_text_and_offsets_do_not_depend_on_how_tokens_were_cut() -> None:
    draw = random.Random(3)
    for _ in range(100):
        tokens = [draw.choice([draw.randrange(256), END, NI, HAO, XEN, D, ord("E"), ord("N")]) for _ in range(30)]
        text, offsets, released = Detokenizer(PIECES, ("END", "N!")), [0], [""]
        for token in tokens:
            released.append(released[-1] + text.feed([token]))
            offsets.append(text.text_offset)
        other, at = Detokenizer(PIECES, ("END", "N!")), 0
        shown = ""
        while at < len(tokens):
            step = draw.randrange(1, 8)
            shown += other.feed(tokens[at : at + step])
            at = min(at + step, len(tokens))
            assert (shown, other.text_offset) == (released[at], offsets[at])


def test_the_beginning_of_a_stop_is_held_back_and_released_when_it_is_none() -> None:
    text = Detokenizer(PIECES, ("END",))
    assert [text.feed([XEN]), text.feed([ord("D") + 1])] == ["x", "EN"]
    assert text.finish() == "E"


def test_a_stop_inside_of_a_token_cuts_the_text_but_not_before_it_is_known() -> None:
    assert run([ord("a"), XEN, D, ord("z")][:3], ("END",), matched="END") == "ax"
    assert run([ord("a"), END], ("END",), matched="END") == "a"
    assert run([ord("a"), XEN], ("END",)) == "axEN", "the session ended for another reason"


def test_a_stop_that_did_not_end_the_session_is_text() -> None:
    """Before min_tokens a stop string does not stop; holding it back for good would lose it."""
    text = Detokenizer(PIECES, ("END",))
    assert [text.feed([END]), text.feed([ord("b")]), text.finish()] == ["", "ENDb", ""]
    text = Detokenizer(PIECES, ("aa",))
    assert text.feed(list(b"aa")) == ""  # overruled
    assert text.feed(list(b"a")) + text.finish("aa") == "a", "the match that counts ends in the last token"


def test_of_two_stops_the_reported_one_cuts() -> None:
    assert run([ord("x"), *b"ab"], ("b", "ab"), matched="ab") == "x"
    assert run([ord("x"), *b"ab"], ("b", "ab"), matched="b") == "xa"


def test_control_and_stop_tokens_have_no_text() -> None:
    text = Detokenizer(PIECES, silent=(ord("q"),))
    assert text.feed([ord("a"), CONTROL, ord("q"), ord("b")]) == "ab"
