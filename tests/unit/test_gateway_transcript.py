"""A client that comes back with any tokens and any text of a session gets the rest of both, once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import pytest

from hedgerow import digest
from hedgerow.errors import DeadlineExceeded, InvalidRequest, LostSuffix, Unavailable
from services.gateway import stream as streams
from services.gateway.detokenizer import Detokenizer
from services.gateway.messages import End, State, Stored, Usage
from services.gateway.reader import Reader
from services.gateway.session import Options, Session
from services.gateway.stream import Chunk, Finished, Position, Started, Stream
from services.gateway.tokenizer import Tokenizer
from services.gateway.types import Finish, Sampling
from tests.unit.gateway_peers import record
from tests.unit.test_tokenizer import BUNDLED

TEXT = (
    'def grüße(名前: str) -> str:\n    """你好 🌱🌿, %s"""\n    return f"🚀{名前}ENDE\u0301 naïve"  # ENDgültig\n' * 3
)
STOPS = ("ENDX", "🌱🌿🌲", "naïvety", "\n\n\n")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(BUNDLED)


class Rest(NamedTuple):
    """What a client got."""

    chunks: list[Chunk]
    end: Finished | None

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.tokens]

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)


class Passive:
    """Readers of sessions that nobody runs."""

    def read(self, session: Session, wake: object, offset: int, digest: bytes) -> Reader:
        return Reader(session, lambda: None, lambda session: None, offset, digest)

    def leave(self, reader: Reader, *, detach: bool) -> None:
        self.detached = detach


def ended(tokens: Sequence[int], *, stop: tuple[str, ...] = (), matched: str = "") -> Session:
    new = record(max_tokens=len(tokens))
    object.__setattr__(new, "resolved", Sampling(seed=1, max_tokens=len(tokens), stop=stop))
    first = digest.first(new.session_id, new.prompt)
    finish = Finish.STOP if matched else Finish.LENGTH
    state = State(1, b"", len(tokens), digest.extend(first, tokens), finish, Usage(), matched_stop=matched)
    return Session.ended(Stored(new, state, tokens))


async def rest(session: Session, pieces: Sequence[bytes], at: Position) -> Rest:
    stream, got, end = Stream(session, pieces, Passive(), at), [], None
    async for event in stream.events():
        if isinstance(event, Chunk):
            got.append(event)
        elif isinstance(event, Finished):
            end = event
        else:
            assert isinstance(event, Started)
    stream.close()
    for before, after in pairwise(got):
        assert after.token_offset == before.token_offset + len(before.tokens)
        assert after.text_offset == before.text_offset + len(before.text.encode())
    if end and got:
        assert end.token_offset == got[-1].token_offset + len(got[-1].tokens)
        assert end.text_offset == got[-1].text_offset + len(got[-1].text.encode())
    return Rest(got, end)


def random_tokens(draw: random.Random, tokenizer: Tokenizer) -> list[int]:
    """Text cut into tokens as no tokenizer would: inside of characters and of possible stops, with junk between."""
    tokens: list[int] = []
    for part in TEXT.split(" "):
        data = part.encode() + b" "
        while data:
            cut = draw.randrange(1, 6)
            tokens += [tokenizer.pieces.index(bytes([byte])) for byte in data[:1]]
            tokens += tokenizer.encode(data[1:cut].decode("utf-8", "ignore"))
            data = data[cut:]
            if draw.random() < 0.05:
                tokens.append(draw.randrange(len(tokenizer.pieces)))
    return tokens


@pytest.mark.parametrize("seed", range(12))
async def test_a_client_that_was_cut_off_anywhere_gets_the_rest_once(tokenizer: Tokenizer, seed: int) -> None:
    """With the offsets of its last event, with those tokens alone, and with that text alone."""
    draw = random.Random(seed)
    tokens = random_tokens(draw, tokenizer) if seed % 2 else tokenizer.encode(TEXT)
    session = ended(tokens, stop=STOPS if seed % 3 else ())
    whole = await rest(session, tokenizer.pieces, Position())
    assert whole.tokens == tokens
    released = Detokenizer(tokenizer.pieces, session.record.resolved.stop)
    marks, shown = [(0, 0)], ""
    while marks[-1][0] < len(tokens):
        at = marks[-1][0]
        to = min(len(tokens), at + draw.randrange(1, 9))
        shown += released.feed(tokens[at:to])
        assert whole.text.startswith(shown)
        marks.append((to, released.text_offset))
    for offset, text_offset in draw.sample(marks, 25):
        known = digest.extend(session.first_digest, tokens[:offset])
        for at in (Position(offset, known, text_offset), Position(offset, known, None if offset else 0)):
            got = await rest(session, tokenizer.pieces, at)
            assert got.tokens == tokens[offset:]
            assert got.text.encode() == whole.text.encode()[text_offset:]
            assert got.end == whole.end
        by_text = await rest(session, tokenizer.pieces, Position(text=text_offset))
        assert by_text.text.encode() == whole.text.encode()[text_offset:]
        assert by_text.tokens == tokens[len(tokens) - len(by_text.tokens) :]
        assert len(by_text.tokens) <= len(tokens) - offset
        assert by_text.end == whole.end


async def test_text_and_tokens_may_come_from_different_events(tokenizer: Tokenizer) -> None:
    """A client may have handled more of the one than of the other."""
    tokens = tokenizer.encode(TEXT)
    session = ended(tokens, stop=STOPS)
    whole = (await rest(session, tokenizer.pieces, Position())).text
    starts = [len(whole[:i].encode()) for i in range(len(whole) + 1)]
    draw = random.Random(4)
    for _ in range(60):
        offset, text_offset = draw.randrange(1, len(tokens) + 1), draw.choice(starts[1:])
        got = await rest(session, tokenizer.pieces, Position(offset, b"", text_offset))
        assert got.tokens == tokens[offset:]
        assert got.text.encode() == whole.encode()[text_offset:]
        if got.chunks:
            assert got.chunks[0].text_offset <= text_offset


async def test_what_is_left_of_the_text_comes_with_the_end(tokenizer: Tokenizer) -> None:
    """The last tokens were there, and a beginning of a stop was held back; or the client has that already too."""
    tokens = tokenizer.encode("a = 1\nEND")
    session = ended(tokens, stop=("ENDX",))
    digests = digest.extend(session.first_digest, tokens)
    held = await rest(session, tokenizer.pieces, Position(len(tokens), digests, 6))
    assert [(c.token_offset, c.text_offset, list(c.tokens), c.text) for c in held.chunks] == [
        (len(tokens), 6, [], "END")
    ]
    assert held.end is not None
    assert held.end.text_offset == 9
    everything = await rest(session, tokenizer.pieces, Position(len(tokens), digests, 9))
    assert everything.chunks == []
    assert everything.end == held.end


async def test_text_behind_a_matched_stop_is_nobodys(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("abc STOP")
    session = ended(tokens, stop=("STOP",), matched="STOP")
    for at in (Position(), Position(1), Position(text=1), Position(len(tokens))):
        got = await rest(session, tokenizer.pieces, at)
        assert "abc ".endswith(got.text)
        assert got.end is not None
        assert got.end.text_offset == 4
    with pytest.raises(LostSuffix, match="you have 5 bytes of text, the log 4"):
        await rest(session, tokenizer.pieces, Position(len(tokens), text=5))


@pytest.mark.parametrize("tokens", [0, 1])
async def test_a_text_offset_inside_of_a_character_is_refused(tokenizer: Tokenizer, tokens: int) -> None:
    session = ended(tokenizer.encode("x 你好"))
    with pytest.raises(InvalidRequest, match="text_offset: 3 is not allowed"):
        await rest(session, tokenizer.pieces, Position(tokens, text=3))


async def test_more_text_than_a_running_session_has_is_not_waited_for(tokenizer: Tokenizer) -> None:
    """A text offset alone never lets anything be generated again."""
    session = ended(tokenizer.encode("abc"))
    session.done, session.end = False, None
    with pytest.raises(LostSuffix) as raised:
        await rest(session, tokenizer.pieces, Position(text=9))
    assert raised.value.metadata == {"text_offset": "9", "stored_text_offset": "3"}
    session.acked = 0
    with pytest.raises(LostSuffix, match="you have 9 bytes of text, the log 0"):
        await rest(session, tokenizer.pieces, Position(text=9))


async def test_a_client_is_told_of_its_deadline_though_the_end_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store may be away: the stream ends in time all the same."""
    monkeypatch.setattr(streams, "LATE", 0.01)
    session = Session(record(), 1, Options(deadline=5.0))
    stream = Stream(session, [], Passive(), clock=lambda: 5.0)
    with pytest.raises(DeadlineExceeded):
        _ = [event async for event in stream.events()]


async def test_a_client_whose_offsets_are_wrong_does_not_end_the_session() -> None:
    source = Passive()
    session = Session(record(), 1)
    stream = Stream(session, [], source, Position(5))
    with pytest.raises(LostSuffix):
        _ = [event async for event in stream.events()]
    stream.close()
    assert source.detached


async def test_after_an_error_what_is_held_back_stays_so(tokenizer: Tokenizer) -> None:
    session = ended(tokenizer.encode("a EN"), stop=("END",))
    session.error = Unavailable("verifier", "away")
    events = Stream(session, tokenizer.pieces, Passive()).events()
    assert isinstance(await anext(events), Started)
    chunk = await anext(events)
    assert isinstance(chunk, Chunk)
    assert chunk.text == "a "
    with pytest.raises(Unavailable):
        await anext(events)
    session.error, session.end = None, End(Finish.LENGTH, Usage())
    assert (await rest(session, tokenizer.pieces, Position(text=2))).text == "EN"
