"""Every fault that a stream must survive, by name."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence

from tests.chaos.cluster import LEASE, Shape
from tests.chaos.readers import RawReader
from tests.chaos.redises import Sentinel
from tests.chaos.run import Case, Fault, Run

HOPS = ("gateway", "verifier", "drafter", "kvstore", "redis")
PATIENCE = 3.0  # seconds, the gateway's with a silent verifier
WOKEN_AFTER = 2 * LEASE + 2  # seconds: the lease is over, and another gateway has had time to see it
LOST_SECONDS = 1.0  # of writes that a replica did not get


async def struck(run: Run, service: str) -> str:
    """The process of a service that carries the streams now."""
    cluster = run.cluster
    if service == "gateway":
        return run.gateway()
    if service == "verifier":
        return str(await run.call(cluster.busy))
    if service == "kvstore":
        before = {name: cluster.wires[name].passed for name in cluster.names(service)}
        await asyncio.sleep(0.1)
        return max(before, key=lambda name: cluster.wires[name].passed - before[name])
    return service


def kill(service: str) -> Fault:
    """kill -9 of the process that carries the streams."""

    async def fault(run: Run) -> None:
        name = await struck(run, service)
        run.strikes()
        await run.call(run.cluster.stack.kill, name)

    return fault


async def kill_redis(run: Run) -> None:
    """kill -9 of the store's server, which comes back with what it had written."""
    primary = await run.call(run.cluster.redises.primary)
    run.strikes()
    await run.call(primary.kill)


async def restart_redis(run: Run) -> None:
    """A clean restart: it answers nobody for a moment, and its append-only file is complete."""
    primary = await run.call(run.cluster.redises.primary)
    run.strikes()
    os.kill(primary.pid, signal.SIGTERM)


def stop(service: str, seconds: float) -> Fault:
    """SIGSTOP of the process that carries the streams, and SIGCONT later."""

    async def fault(run: Run) -> None:
        name, stack = await struck(run, service), run.cluster.stack
        pid = stack.pid(name)
        run.strikes()
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)

    return fault


async def stop_gateway_and_take_over(run: Run) -> None:
    """A second client asks another gateway for the session of the first, whose owner is stopped beyond its lease."""
    assert isinstance(run.readers[0], RawReader)
    others = [address for address in run.cluster.gateways() if address != run.readers[0].address]
    second = run.readers[0].twin(others, "the second client")
    run.more.append((second, run.asks[0]))
    reading = asyncio.create_task(second.read())
    await stop("gateway", WOKEN_AFTER)(run)
    await reading


def cut(hop: str) -> Fault:
    """Resets the hop's connections, and refuses new ones for a moment."""

    async def fault(run: Run) -> None:
        wire = run.cluster.wires[await struck(run, hop)]
        run.strikes()
        wire.refuse()
        await asyncio.sleep(run.draw.uniform(0, 1.5))
        wire.heal()

    return fault


def half_open(hop: str) -> Fault:
    """Lets nothing pass on the hop's connections any more, without telling either side."""

    async def fault(run: Run) -> None:
        wire = run.cluster.wires[await struck(run, hop)]
        run.strikes()
        wire.half_open()

    return fault


def silence(hop: str, seconds: float) -> Fault:
    """A partition that heals: nothing passes on the hop, and what was sent comes at its end."""

    async def fault(run: Run) -> None:
        wire = run.cluster.wires[await struck(run, hop)]
        run.strikes()
        wire.silence()
        await asyncio.sleep(seconds)
        wire.heal()

    return fault


async def only_slow(run: Run) -> None:
    """Nothing but readers that stop reading."""
    run.strikes()


def fail_over(*, owner_dies: bool) -> Fault:
    """Sentinel makes a replica the primary that lacks a second of writes."""

    async def fault(run: Run) -> None:
        redises, stack = run.cluster.redises, run.cluster.stack
        assert isinstance(redises, Sentinel)
        await run.call(redises.stop_following)
        await asyncio.sleep(LOST_SECONDS)
        released = {reader.transcript.session_id: len(reader.transcript.tokens) for reader in run.readers}
        kept = await run.call(redises.lengths, redises.replica(), list(released))
        if any(kept[session_id] >= count for session_id, count in released.items()):
            run.failings.append(f"the replica lacks nothing that clients have: {kept} of {released}")
        before = await run.call(redises.primary)
        run.strikes()
        await run.call(before.kill)
        if owner_dies:
            owners = {run.cluster.gateway_at(reader.address) for reader in run.readers}
            for owner in sorted(owners):
                await run.call(stack.kill, owner)
        await run.call(redises.failed_over, before)

    return fault


async def kill_both_verifiers(run: Run) -> None:
    """No standby is left: the streams wait for one that comes back."""
    run.strikes()
    for name in run.cluster.names("verifier"):
        await run.call(run.cluster.stack.kill, name)


async def kill_gateway_and_verifier(run: Run) -> None:
    """Two at once."""
    name = await struck(run, "verifier")
    run.strikes()
    await run.call(run.cluster.stack.kill, run.gateway())
    await run.call(run.cluster.stack.kill, name)


SENTINEL = Shape(sentinel=True)
CASES: Sequence[Case] = (
    Case("kill-gateway", kill("gateway"), slow=False),
    Case("kill-verifier", kill("verifier"), slow=False),
    Case("kill-drafter", kill("drafter"), slow=False),
    Case("kill-kvstore", kill("kvstore"), slow=False),
    Case("kill-redis", kill_redis, slow=False),
    Case("kill-both-verifiers", kill_both_verifiers),
    Case("kill-gateway-and-verifier", kill_gateway_and_verifier),
    Case("restart-redis", restart_redis),
    Case("stop-verifier", stop("verifier", 2 * PATIENCE + 2), slow=False),
    Case("stop-gateway", stop("gateway", WOKEN_AFTER)),
    Case("stop-gateway-and-take-over", stop_gateway_and_take_over, raw=True),
    *(Case(f"cut-{hop}", cut(hop), slow=hop != "verifier") for hop in HOPS),
    *(Case(f"half-open-{hop}", half_open(hop)) for hop in HOPS),
    *(Case(f"silence-{hop}", silence(hop, 2 * LEASE)) for hop in HOPS),
    Case("slow-reader", only_slow, tokens=3000, slow_seconds=30.0),
    Case("sentinel-owner-alive", fail_over(owner_dies=False), SENTINEL, tokens=3000),
    Case("sentinel-owner-dead", fail_over(owner_dies=True), SENTINEL, tokens=3000),
    Case("one-verifier", kill("verifier"), Shape(gateways=1, verifiers=1, kvstores=1)),
)
BY_NAME = {case.name: case for case in CASES}
