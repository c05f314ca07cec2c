"""Keys whose sessions failed before they gave a token: usable again, for the same request, by whoever asks."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from hedgerow.errors import KeyConflict, LostSuffix, Overloaded, SessionFailed
from services.gateway.gateway import Gateway
from services.gateway.messages import Appended, AppendStatus, Timings
from services.gateway.position import Position
from services.gateway.stream import Finished, Stream
from services.gateway.tokenizer import Tokenizer
from services.gateway.types import Finish
from tests.polling import soon
from tests.unit.gateway_peers import CANCELLED, DEADLINE, ERROR, update
from tests.unit.shared_store import Kept, SharedStore
from tests.unit.test_gateway_joining import ASKED, TOKENS, A, B, gateway_of, read
from tests.unit.test_tokenizer import BUNDLED

FULL = Overloaded("waiting queue", 1, 1, 0.1)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(BUNDLED)


@pytest.fixture
def store() -> SharedStore:
    return SharedStore()


@pytest_asyncio.fixture
async def gateway(store: SharedStore, tokenizer: Tokenizer) -> AsyncIterator[Gateway]:
    made = gateway_of(store, B, tokenizer)
    yield made
    made.release()
    await soon(lambda: not made.held()["followed"] and not store.follows)


def only(store: SharedStore) -> Kept:
    (kept,) = store.kept.values()
    return kept


async def refuse(gateway: Gateway, stream: Stream, kept: Kept) -> None:
    """The verifier has no place for the stream's session, and the store has heard."""
    gateway.table.stepped([update(stream.session, [], finish=ERROR, error=FULL, stats=None)], Timings())
    kept.grow([], finish=ERROR)
    gateway.table.appended([Appended(stream.session.id, AppendStatus.OK, kept.state)])
    with pytest.raises(Overloaded):
        await read(stream, 1)
    stream.close()
    assert not gateway.table.sessions


async def failed(store: SharedStore, tokenizer: Tokenizer, **state: object) -> Kept:
    """The key's session ended so at another gateway, A, without a token."""
    await gateway_of(store, A, tokenizer).generate(ASKED, None)
    kept = only(store)
    kept.grow([], **state)
    return kept


async def test_a_key_that_met_a_full_queue_again_and_again_begins_its_session_when_there_is_room(
    store: SharedStore,
    gateway: Gateway,
) -> None:
    births = set()
    for epoch in (1, 2, 3):
        stream = await gateway.generate(ASKED, None)
        kept = only(store)
        births.add(kept.record.birth)
        assert (kept.state.epoch, kept.state.finish, kept.tokens) == (epoch, Finish.NONE, [])
        assert stream.session.is_new, "it is refused at once where there is no place, and not waited for"
        await refuse(gateway, stream, kept)
    stream = await gateway.generate(ASKED, None)
    kept = only(store)
    assert (kept.state.epoch, len(births | {kept.record.birth})) == (4, 4)
    gateway.table.stepped([update(stream.session, [7])], Timings())
    kept.grow([7])
    gateway.table.appended([Appended(stream.session.id, AppendStatus.OK, kept.state)])
    assert await read(stream, 1) == [7]
    stream.close()


async def test_another_gateway_begins_what_one_refused(
    store: SharedStore,
    gateway: Gateway,
    tokenizer: Tokenizer,
) -> None:
    before = (await failed(store, tokenizer, finish=ERROR)).record
    stream = await gateway.generate(ASKED, None)
    kept = only(store)
    assert (kept.state.owner, kept.state.epoch, kept.state.finish) == (B, 2, Finish.NONE)
    assert (kept.record.session_id, kept.record.resolved) == (before.session_id, before.resolved)
    assert (stream.session.record.birth, kept.record.birth != before.birth) == (kept.record.birth, True)
    stream.close()


async def test_another_request_under_a_refused_key_is_refused_as_such(
    store: SharedStore,
    gateway: Gateway,
    tokenizer: Tokenizer,
) -> None:
    kept = await failed(store, tokenizer, finish=ERROR)
    with pytest.raises(KeyConflict, match="prompt"):
        await gateway.generate(dataclasses.replace(ASKED, prompt=(9, 9)), None)
    assert only(store) is kept


@pytest.mark.parametrize("finish", [CANCELLED, DEADLINE])
async def test_an_end_that_was_asked_for_is_what_the_key_gives(
    store: SharedStore,
    gateway: Gateway,
    tokenizer: Tokenizer,
    finish: Finish,
) -> None:
    kept = await failed(store, tokenizer, finish=finish)
    events = [event async for event in (await gateway.generate(ASKED, None)).events()]
    assert isinstance(events[-1], Finished)
    assert (events[-1].end.reason, only(store)) == (finish, kept)


async def test_an_error_behind_tokens_is_what_the_key_gives(
    store: SharedStore,
    gateway: Gateway,
    tokenizer: Tokenizer,
) -> None:
    kept = await failed(store, tokenizer)
    kept.grow(TOKENS, finish=ERROR)
    stream = await gateway.generate(ASKED, None)
    with pytest.raises(SessionFailed):
        await read(stream, 4)
    assert only(store) is kept


async def test_of_two_who_ask_again_at_once_one_begins_it_and_both_read_it(
    store: SharedStore,
    gateway: Gateway,
    tokenizer: Tokenizer,
) -> None:
    """Another gateway takes the failed one's place between this one's look at it and its own attempt."""
    await failed(store, tokenizer, finish=ERROR)
    other, create = gateway_of(store, A, tokenizer), gateway._creating._store.create

    async def outrun(record: object, digest: bytes, replaces: bytes = b"") -> object:
        if replaces:
            await other.generate(ASKED, None)
            only(store).grow(TOKENS)
        return await create(record, digest, replaces)  # type: ignore[arg-type]

    gateway._creating._store.create = outrun  # type: ignore[assignment, method-assign]
    stream = await gateway.generate(ASKED, None)
    assert await read(stream, 3) == TOKENS
    assert (only(store).state.owner, only(store).state.epoch) == (A, 2)
    stream.close()


async def test_a_client_with_tokens_is_not_told_of_the_failed_one_that_a_store_remembers(
    store: SharedStore,
    gateway: Gateway,
    tokenizer: Tokenizer,
) -> None:
    """The store lost the one that took its place: its owner writes it again, or the tokens are lost."""
    kept = await failed(store, tokenizer, finish=ERROR)
    gateway._resuming._times = gateway._resuming._times._replace(repair=0.05)
    with pytest.raises(LostSuffix):
        await gateway.resume(kept.record.session_id, "", Position(2, b"d" * 16), detach=True)
    stream = await gateway.resume(kept.record.session_id, "", Position(0), detach=True)
    with pytest.raises(SessionFailed):
        await read(stream, 1)
