"""An answer's parts in a client's stream: the same from wherever it is resumed, and the reason of its end."""

from __future__ import annotations

import pytest

from hedgerow import digest
from services.gateway import stream as streams
from services.gateway.chat import KimiTemplate
from services.gateway.convert import event
from services.gateway.deltas import Call, Content, Delta, Reasoning
from services.gateway.members import MEMBERS
from services.gateway.reading import Readers
from services.gateway.session import Session
from services.gateway.stream import Chunk, Finished, Position, Stream
from services.gateway.types import Chat, Finish
from tests.kimi import ids_of, load_bundled
from tests.unit.test_answers import END_SECTION, ONE, SECTION, TOOLS, TWO, USER, WHOLE_ONE, WHOLE_TWO, joined
from tests.unit.test_gateway_transcript import Passive, ended

ANSWER = f"Hm, 北京.</think>Look 🌱: {SECTION}{ONE}{TWO}{END_SECTION}"
PARTS = [Reasoning("Hm, 北京."), Content("Look 🌱: "), WHOLE_ONE, WHOLE_TWO]


def session_of(text: str, *, chat: bool = True, finish: Finish = Finish.STOP) -> Session:
    vocabulary = load_bundled()
    tokens = ids_of(vocabulary, text)
    session = ended(tokens)
    if chat:
        prompt = tuple(KimiTemplate(MEMBERS["k2.6"], vocabulary).render(Chat((USER,), TOOLS)))
        object.__setattr__(session.record, "prompt", prompt)
    assert session.end is not None
    session.end = session.end._replace(reason=finish)
    return session


async def rest(session: Session, at: Position) -> tuple[list[Chunk], Finished]:
    stream = Stream(session, load_bundled().pieces, Passive(), at, reader=Readers(load_bundled()).of)
    events = [each async for each in stream.events()]
    stream.close()
    assert isinstance(events[-1], Finished)
    return [each for each in events if isinstance(each, Chunk)], events[-1]


def deltas(chunks: list[Chunk]) -> list[Delta]:
    return [delta for chunk in chunks for delta in chunk.deltas]


async def test_parts_go_on_from_any_token_and_any_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beginning and rest together are the whole, wherever they are cut: in a marker, a character, an argument."""
    session = session_of(ANSWER)
    tokens = list(session.tokens)
    whole, end = await rest(session, Position())
    assert joined(deltas(whole)) == PARTS
    assert end.end.reason is Finish.TOOL_CALLS
    before: list[Delta] = []
    reader = Readers(load_bundled()).of(session.record)
    assert reader is not None
    for offset, token in enumerate(tokens, 1):
        before += reader.feed([token])
        got, again = await rest(session, Position(offset, digest.extend(session.first_digest, tokens[:offset])))
        assert joined([*before, *deltas(got)]) == PARTS
        assert again == end
    shown = "".join(chunk.text for chunk in whole)
    for text in range(0, len(shown), 7):
        got, _ = await rest(session, Position(text=len(shown[:text].encode())))
        known = len(tokens) - sum(len(chunk.tokens) for chunk in got)
        reader = Readers(load_bundled()).of(session.record)
        assert reader is not None
        assert joined([*reader.feed(tokens[:known]), *deltas(got)]) == PARTS
    monkeypatch.setattr(streams, "PIECE_TOKENS", 3)  # what a client has is passed over in pieces
    got, _ = await rest(session, Position(20, digest.extend(session.first_digest, tokens[:20])))
    reader = Readers(load_bundled()).of(session.record)
    assert reader is not None
    assert joined([*reader.feed(tokens[:20]), *deltas(got)]) == PARTS


@pytest.mark.parametrize(
    ("text", "finish", "told"),
    [
        (f"</think>{SECTION}{ONE}", Finish.STOP, Finish.TOOL_CALLS),
        (f"</think>{SECTION}{ONE}", Finish.LENGTH, Finish.LENGTH),
        (f"</think>{SECTION}{ONE[:-30]}", Finish.STOP, Finish.STOP),  # none that is complete
        ("</think>Hello", Finish.STOP, Finish.STOP),
    ],
)
async def test_a_turn_that_ends_with_complete_calls_says_so(text: str, finish: Finish, told: Finish) -> None:
    _, end = await rest(session_of(text, finish=finish), Position())
    assert end.end.reason is told


async def test_outside_of_a_conversation_there_are_no_parts() -> None:
    chunks, end = await rest(session_of(ANSWER, chat=False), Position())
    assert not deltas(chunks)
    assert end.end.reason is Finish.STOP


async def test_a_marker_alone_is_an_empty_part_on_the_wire() -> None:
    """So a client knows from any chunk whether there are parts."""
    chunks, _ = await rest(session_of("</think>"), Position())
    told = [event(chunk, with_steps=False).chunk for chunk in chunks]
    assert [(each.text, [delta.WhichOneof("kind") for delta in each.deltas]) for each in told] == [
        ("</think>", ["content"])
    ]
    chunks, _ = await rest(session_of(ANSWER), Position())
    calls = [delta.tool_call for chunk in chunks for delta in event(chunk, with_steps=False).chunk.deltas][-2:]
    assert [(c.index, c.id, c.name, c.arguments, c.complete, c.malformed) for c in calls] == [
        (0, "functions.weather:0", "weather", '{"city": "北京"}', True, ""),
        (1, "functions.now:1", "now", "{}", True, ""),
    ]  # fmt: skip
    assert isinstance(PARTS[2], Call)
