"""Stop tokens, stop strings and lengths end a sequence with the right token, reason and match."""

from __future__ import annotations

import pytest

from hedgerow.engine.stops import Stop, StopWatch
from hedgerow.engine.types import Finish, Sampling

WORDS = [b"", b"a", b"b", b"ab", b"abc", b"\xe2\x82", b"\xac", b"xaby", b"\n\n", b"c"]
EOS = frozenset({0})


def run(sampling: Sampling, tokens: list[int]) -> tuple[int, Stop | None]:
    """Tokens taken until the watch spoke, and what it said."""
    watch = StopWatch(sampling, WORDS, EOS)
    for count, token in enumerate(tokens, 1):
        stop = watch.feed(token)
        if stop is not None:
            return count, stop
    return len(tokens), None


def test_the_end_of_sequence_token_ends_it_and_is_named() -> None:
    assert run(Sampling(), [1, 0, 2]) == (2, Stop(Finish.STOP, token=0))


def test_an_ignored_end_of_sequence_token_does_not_end_it() -> None:
    assert run(Sampling(ignore_eos=True), [1, 0, 2]) == (3, None)
    assert run(Sampling(ignore_eos=True, stop_token_ids=(2,)), [1, 0, 2]) == (3, Stop(Finish.STOP, token=2))


def test_the_length_ends_it_unless_a_stop_came_with_the_same_token() -> None:
    assert run(Sampling(max_tokens=2), [1, 1, 1]) == (2, Stop(Finish.LENGTH))
    assert run(Sampling(max_tokens=2), [1, 0]) == (2, Stop(Finish.STOP, token=0))
    assert run(Sampling(max_tokens=2, stop=("b",)), [1, 3]) == (2, Stop(Finish.STOP, string="b"))


@pytest.mark.parametrize(
    ("stop", "tokens", "count", "matched"),
    [
        (("ab",), [1, 2, 1], 2, "ab"),  # begins in one token, ends in the next
        (("ab",), [7], 1, "ab"),  # inside of one token
        (("aab",), [1, 1, 1, 2, 1], 4, "aab"),  # overlaps itself
        (("\u20ac",), [1, 5, 6], 3, "\u20ac"),  # a character in two tokens
        (("b", "ab"), [1, 3], 2, "ab"),  # both end in one token: the one that begins first
        (("bc", "abcd"), [4], 1, "bc"),
        (("\n\n",), [1, 8], 2, "\n\n"),
        (("zz",), [1, 2, 3, 4], 4, None),
        (("b",), [1, 0], 2, None),  # a control token has no text
    ],
)
def test_a_stop_string_ends_it_at_the_token_that_completes_it(
    stop: tuple[str, ...], tokens: list[int], count: int, matched: str | None
) -> None:
    expected = None if matched is None else Stop(Finish.STOP, string=matched)
    assert run(Sampling(stop=stop, ignore_eos=True), tokens) == (count, expected)


def test_a_stop_before_min_tokens_is_overruled_and_not_found_again() -> None:
    """The kept tail is as long as the longest stop string, so a shorter one in it would match at the next token."""
    sampling = Sampling(min_tokens=2, stop=("a", "abcdefgh"), stop_token_ids=(9,))
    assert run(sampling, [1, 2, 2, 2]) == (4, None)
    assert run(sampling, [2, 2, 1]) == (3, Stop(Finish.STOP, string="a"))
    assert run(sampling, [9, 2, 9]) == (3, Stop(Finish.STOP, token=9))
