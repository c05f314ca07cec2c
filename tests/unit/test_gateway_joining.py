"""One idempotency key, one session: wherever it runs, however its first client or its gateway went away."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from hedgerow import digest
from hedgerow.errors import KeyConflict, SessionFailed, SessionUnknown, Unavailable
from services.gateway.config import GatewayConfig
from services.gateway.gateway import Gateway
from services.gateway.messages import Appended, AppendStatus, Created, State
from services.gateway.position import Position
from services.gateway.stream import Chunk, Finished, Stream
from services.gateway.templates import template_of
from services.gateway.tokenizer import Tokenizer
from services.gateway.types import Finish, Generation, Record, Sampling
from tests.polling import soon
from tests.unit.gateway_peers import CANCELLED, ERROR, LENGTH
from tests.unit.shared_store import NOBODY, Kept, SharedStore, SharedStoreView
from tests.unit.test_gateway_endings import IdleVerifier
from tests.unit.test_tokenizer import BUNDLED

A, B = b"a" * 16, b"b" * 16
ASKED = Generation("", (1, 2, 3), Sampling(max_tokens=9), idempotency_key="k", detach=True)
TOKENS = [7, 8, 9]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(BUNDLED)


@pytest.fixture
def store() -> SharedStore:
    return SharedStore()


def gateway_of(store: SharedStore, owner: bytes, tokenizer: Tokenizer) -> Gateway:
    config = GatewayConfig(
        verifier="v", kvstore="k", model_path=BUNDLED, tenant_secret="s" * 16, lease_seconds=0.2, orphan_seconds=0.2
    )
    return Gateway(config, template_of(BUNDLED, tokenizer), [IdleVerifier()], store.of(owner))  # type: ignore[list-item, arg-type]


@pytest_asyncio.fixture
async def gateway(store: SharedStore, tokenizer: Tokenizer) -> AsyncIterator[Gateway]:
    made = gateway_of(store, B, tokenizer)
    yield made
    made.release()
    await soon(lambda: not made.held()["followed"] and not store.follows)


async def left(store: SharedStore, tokenizer: Tokenizer, **state: Any) -> Kept:
    """The key's session as another gateway, A, began it and left it."""
    other = gateway_of(store, A, tokenizer)
    await other.generate(ASKED, None)
    (kept,) = store.kept.values()
    kept.grow(TOKENS, **state)
    return kept


async def read(stream: Stream, tokens: int) -> list[int]:
    got: list[int] = []
    async with asyncio.timeout(5):
        async for event in stream.events():
            if isinstance(event, Chunk):
                got += event.tokens
            if len(got) >= tokens:
                break
    return got


async def test_a_key_joins_its_session_while_another_gateway_runs_it(
    store: SharedStore, gateway: Gateway, tokenizer: Tokenizer
) -> None:
    """Its gateways need the same secret, of which the key's session id is made."""
    kept = await left(store, tokenizer)
    stream = await gateway.generate(ASKED, None)
    reading = asyncio.create_task(read(stream, 5))
    await soon(lambda: store.follows == 1)
    kept.grow([10, 11], finish=LENGTH)
    assert await reading == [*TOKENS, 10, 11]
    assert kept.state.owner == A
    assert len(store.kept) == 1
    stream.close()


async def test_a_key_whose_gateway_died_goes_on_here(
    store: SharedStore, gateway: Gateway, tokenizer: Tokenizer
) -> None:
    kept = await left(store, tokenizer)
    store.alive.remove(A)
    stream = await gateway.generate(ASKED, None)
    assert await read(stream, 3) == TOKENS
    assert (kept.state.owner, kept.state.epoch, kept.state.finish) == (B, 2, Finish.NONE)
    assert list(gateway.table.sessions) == [kept.record.session_id]
    stream.close()


async def test_a_key_whose_session_ended_gives_all_of_it_again(
    store: SharedStore, gateway: Gateway, tokenizer: Tokenizer
) -> None:
    await left(store, tokenizer, finish=LENGTH)
    stream = await gateway.generate(ASKED, None)
    events = [event async for event in stream.events()]
    assert isinstance(events[-1], Finished)
    assert (events[-1].end.reason, events[-1].token_offset) == (LENGTH, 3)


async def test_a_key_whose_session_ended_with_an_error_gives_its_tokens_and_no_hope(
    store: SharedStore, gateway: Gateway, tokenizer: Tokenizer
) -> None:
    await left(store, tokenizer, finish=ERROR)
    stream = await gateway.generate(ASKED, None)
    assert await read(stream, 3) == TOKENS
    with pytest.raises(SessionFailed, match="another idempotency key") as raised:
        await read(stream, 4)
    assert raised.value.retry_after is None


async def test_a_key_whose_session_failed_loudly_here_has_failed(store: SharedStore, gateway: Gateway) -> None:
    """Its end was not on record yet: it must not go on as if nothing had happened."""
    stream = await gateway.generate(ASKED, None)
    store.kept[stream.session.id].grow([7])
    gateway.table.appended([Appended(stream.session.id, AppendStatus.CONFLICT, State())])
    assert not gateway.table.sessions
    stream.close()
    again = await gateway.generate(ASKED, None)
    assert isinstance(again.session.error, SessionFailed)
    assert [kept.state.finish for kept in store.kept.values()] == [ERROR]


@pytest.mark.parametrize("where", ["here", "elsewhere", "nobody", "ended"])
@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt": (1, 2, 4)}, "prompt"),
        ({"sampling": Sampling(max_tokens=8)}, "sampling.max_tokens"),
        ({"sampling": Sampling(max_tokens=9, stop=("x",))}, "sampling.stop"),
    ],
)
async def test_another_request_under_a_key_is_refused_by_field_and_nothing_is_changed(
    store: SharedStore, gateway: Gateway, tokenizer: Tokenizer, where: str, change: dict[str, Any], field: str
) -> None:
    if where == "here":
        await gateway.generate(ASKED, None)
    else:
        await left(store, tokenizer, **({"finish": LENGTH} if where == "ended" else {}))
    if where == "nobody":
        store.alive.remove(A)
    (kept,) = store.kept.values()
    before = kept.state
    with pytest.raises(KeyConflict) as raised:
        await gateway.generate(dataclasses.replace(ASKED, **change), None)
    assert (raised.value.field, raised.value.metadata["field"]) == (field, field)
    assert kept.state == before
    assert gateway.held()["followed"] == 0


async def test_what_changes_no_token_may_differ_under_a_key(store: SharedStore, gateway: Gateway) -> None:
    first = await gateway.generate(ASKED, None)
    other = dataclasses.replace(ASKED, priority=5, deadline_ms=9_000, return_steps=True, detach=False)
    assert (await gateway.generate(other, 3.0)).session is first.session
    assert len(store.kept) == 1


async def test_a_key_of_another_tenant_is_another_session(store: SharedStore, gateway: Gateway) -> None:
    first = await gateway.generate(ASKED, None)
    second = await gateway.generate(dataclasses.replace(ASKED, tenant="t"), None)
    assert first.session is not second.session
    for call in (gateway.session, gateway.cancel, gateway.delete):
        with pytest.raises(SessionUnknown):
            await call(second.session.id, "u")
    with pytest.raises(SessionUnknown):
        await gateway.resume(second.session.id, "", Position(), detach=True)
    assert second.session.end is None


async def test_a_creation_whose_answer_was_lost_is_given_back_for_its_client_to_join(
    store: SharedStore, gateway: Gateway, tokenizer: Tokenizer
) -> None:
    """It was ended as an error, and the client's next try, with the same key, was told so."""
    store.grants_unheard = True
    with pytest.raises(Unavailable):
        await gateway.generate(ASKED, None)
    (kept,) = store.kept.values()
    await gateway._tidy()
    await soon(lambda: kept.state.owner == NOBODY)
    other = gateway_of(store, A, tokenizer)
    stream = await other.generate(ASKED, None)
    assert (kept.state.owner, stream.session.record.birth) == (A, kept.record.birth)


async def test_a_creation_that_the_store_loses_before_it_is_read_is_written_again(
    store: SharedStore, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client was told that the session is unknown, of a request that was all there."""
    store.grants_unheard = True
    with pytest.raises(Unavailable):
        await gateway.generate(ASKED, None)
    (lost,) = store.kept.values()
    create = SharedStoreView.create

    async def forgets(view: SharedStoreView, record: Record, digest: bytes, replaces: bytes = b"") -> Created:
        created = await create(view, record, digest, replaces)
        if store.kept.get(record.session_id) is lost:
            del store.kept[record.session_id]
        return created

    monkeypatch.setattr(SharedStoreView, "create", forgets)
    stream = await gateway.generate(ASKED, None)
    (kept,) = store.kept.values()
    assert kept is not lost
    assert stream.session.record.birth == kept.record.birth != lost.record.birth


async def test_a_lease_that_a_store_was_too_long_away_to_take_back_is_given_back_later(
    store: SharedStore, gateway: Gateway
) -> None:
    """While this gateway lives, its leases do: nobody else could have taken the session."""
    stream = await gateway.generate(ASKED, None)
    (kept,) = store.kept.values()
    gateway._leases._patience = 0.05
    store.away = True
    gateway.table.store_lost(Unavailable("kvstore", "away"))
    await soon(lambda: not gateway.held()["leases"])
    await gateway._tidy()
    store.away = False
    assert kept.state.owner == B
    await gateway._tidy()
    await soon(lambda: kept.state.owner == NOBODY)
    assert isinstance(stream.session.error, Unavailable)


async def test_the_record_keeps_what_a_take_over_needs(store: SharedStore, gateway: Gateway) -> None:
    asked = dataclasses.replace(ASKED, priority=-4, deadline_ms=60_000, return_steps=True, return_trees=True)
    await gateway.generate(asked, 30.0)
    (record,) = (kept.record for kept in store.kept.values())
    assert (record.detach, record.priority, record.return_steps, record.return_trees) == (True, -4, True, True)
    assert record.deadline_unix_ms - record.created_unix_ms == 30_000, "the sooner of the two"


async def test_a_client_that_goes_away_during_creation_ends_what_is_not_detached(
    store: SharedStore, gateway: Gateway
) -> None:
    for detach in (True, False):
        asked = dataclasses.replace(ASKED, idempotency_key=str(detach), detach=detach)
        calling = asyncio.create_task(gateway.generate(asked, None))
        await asyncio.sleep(0)
        calling.cancel()
        await asyncio.wait([calling])
    await soon(lambda: len(gateway.table.sessions) == 2)
    ends = {session.record.detach: session.end for session in gateway.table.sessions.values()}
    assert ends[True] is None
    assert ends[False] is not None
    assert ends[False].reason is CANCELLED


async def test_a_joiner_that_goes_away_ends_nothing_that_another_gateway_runs(
    store: SharedStore, gateway: Gateway, tokenizer: Tokenizer
) -> None:
    """It was to be cancelled as if it ran here."""
    asked = dataclasses.replace(ASKED, detach=False)
    other = gateway_of(store, A, tokenizer)
    await other.generate(asked, None)
    (kept,) = store.kept.values()
    calling = asyncio.create_task(gateway.generate(asked, None))
    for _ in range(50):
        if gateway.held()["creating"]:
            break
        await asyncio.sleep(0)
    assert gateway.held()["creating"]
    calling.cancel()
    await asyncio.wait([calling])
    await soon(lambda: not gateway.held()["creating"] and not gateway.held()["followed"])
    assert (kept.state.owner, kept.state.cancel_marked, kept.state.finish) == (A, False, Finish.NONE)


async def test_a_draining_gateway_gives_its_sessions_up_at_once(
    store: SharedStore, gateway: Gateway, tokenizer: Tokenizer
) -> None:
    stream = await gateway.generate(ASKED, None)
    (kept,) = store.kept.values()
    kept.grow(TOKENS)
    gateway.release()
    with pytest.raises(Unavailable, match="draining") as raised:
        _ = [event async for event in stream.events()]
    assert raised.value.retry_after == 0.0
    await soon(lambda: kept.state.owner == NOBODY)
    other = gateway_of(store, A, tokenizer)
    first = digest.first(kept.record.session_id, kept.record.prompt)
    resumed = await other.resume(kept.record.session_id, "", Position(2, digest.extend(first, TOKENS[:2])), detach=True)
    assert await read(resumed, 1) == TOKENS[2:]
    assert kept.state.owner == A


async def test_a_cancel_that_is_acknowledged_is_in_the_store_too(store: SharedStore, tokenizer: Tokenizer) -> None:
    """Its gateway was killed before the end was stored, and the next one went on as if nobody had cancelled."""
    gateway = gateway_of(store, A, tokenizer)
    stream = await gateway.generate(ASKED, None)
    (kept,) = store.kept.values()
    assert await gateway.cancel(stream.session.id, "")
    assert (kept.state.cancel_marked, kept.state.finish) == (True, Finish.NONE)
    assert not await gateway.cancel(stream.session.id, ""), "it has ended here"


async def test_a_cancel_of_what_the_store_has_lost_is_taken_by_its_owner(
    store: SharedStore, tokenizer: Tokenizer
) -> None:
    gateway = gateway_of(store, A, tokenizer)
    stream = await gateway.generate(ASKED, None)
    store.kept.clear()
    assert await gateway.cancel(stream.session.id, "")
    assert stream.session.end is not None
    assert stream.session.end.reason is Finish.CANCELLED
