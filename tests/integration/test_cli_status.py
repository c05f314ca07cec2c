"""`hedgerow status` and `hedgerow sessions` on real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from hedgerow import __version__
from hedgerow.cli.supervisor import Stack
from hedgerow.client import AsyncClient, process_status
from tests.polling import soon
from tests.stack import ROOT, Models, another_gateway, verifier_load

SERVICES = ("gateway", "verifier", "drafter", "kvstore")
NOWHERE = "127.0.0.1:1"
PROMPT = "def quicksort(items):"


def hedgerow(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hedgerow.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_status_reads_every_process(stack: Stack) -> None:
    ended = hedgerow("status", *(stack.admin_address(name) for name in SERVICES))
    assert (ended.returncode, ended.stderr) == (0, "")
    head, *rows = ended.stdout.splitlines()
    assert head.split()[:4] == ["service", "address", "state", "version"]
    for name, line in zip(SERVICES, rows, strict=True):
        assert line.split()[:4] == [name, stack.admin_address(name), "serving", __version__]
    assert "sessions 0" in rows[0]
    assert "model sapling" in rows[1] or "model " in rows[1]
    assert "running 0" in rows[1]
    assert "drafter 1" in rows[1]
    assert "verifiers 1" in rows[2]
    assert "exchanges with Redis " in rows[3]


def test_what_does_not_answer_is_a_row_and_a_status(stack: Stack) -> None:
    one = hedgerow("status", f"{stack.admin_address('kvstore')},{NOWHERE}")
    assert one.returncode == 1
    assert "no answer" in one.stdout.splitlines()[2]
    assert hedgerow("status", NOWHERE).returncode == 3
    public = hedgerow("status", stack.address("verifier"))
    assert public.returncode == 3
    assert "no status" in public.stdout, "the public port tells nothing"


def test_without_processes_the_gateway_is_asked_for_its_models(stack: Stack) -> None:
    ended = hedgerow("status", "--address", stack.address("gateway"))
    assert ended.returncode == 0
    assert ": ready, fingerprint " in ended.stdout
    assert hedgerow("status", "--address", NOWHERE, "--patience", "1").returncode == 3


def test_status_as_json_has_every_metric(stack: Stack) -> None:
    (line,) = hedgerow("status", "--json", stack.admin_address("verifier")).stdout.splitlines()
    told = json.loads(line)
    assert told["numbers"]["hedgerow_verifier_running_sequences"] == 0
    assert not [name for name in told["numbers"] if "_bucket" in name]
    assert (told["service"], told["serving"], told["troubles"]) == ("verifier", True, {})


@asynccontextmanager
async def running(client: AsyncClient, count: int) -> AsyncIterator[list[str]]:
    """The ids of sessions that run until the end of the block."""
    async with AsyncExitStack() as stack:
        streams, read = [], []
        for _ in range(count):
            stream = await stack.enter_async_context(client.generate(PROMPT, max_tokens=4000, ignore_eos=True))
            read.append(stream.events())  # held: a generator that nobody refers to closes its stream
            await anext(read[-1])
            streams.append(stream)
        yield [stream.session_id for stream in streams]


async def test_sessions_are_listed_to_their_tenant_shown_and_cancelled(stack: Stack, idle: None) -> None:
    address = ("--address", stack.address("gateway"))
    async with AsyncClient(stack.address("gateway"), tenant="acme") as client, running(client, 3) as ids:
        listed = await client.sessions()
        assert sorted(each.session_id for each in listed) == sorted(ids)
        assert [len(await client.sessions(most=most)) for most in (1, 2)] == [1, 2]
        for each in listed:
            assert (each.prompt_tokens > 0, each.max_tokens, each.readers, each.exact) == (True, 4000, 1, True)
        lines = hedgerow("sessions", "ls", "--running", "--tenant", "acme", *address).stdout
        assert all(session_id in lines for session_id in ids)
        assert PROMPT not in lines
        for other in ((), ("--tenant", "other")):
            assert hedgerow("sessions", "ls", "--running", *other, *address).stdout == ""
            assert not any(session_id in hedgerow("sessions", "ls", *other, *address).stdout for session_id in ids)
        shown = hedgerow("sessions", "show", ids[0], "--tenant", "acme", *address)
        assert json.loads(shown.stdout)["session_id"] == ids[0]
        assert hedgerow("sessions", "show", ids[0], *address).returncode == 2, "it is another tenant's"
        assert hedgerow("sessions", "cancel", ids[1], "--tenant", "acme", *address).stdout == "cancelled\n"
        assert ids[1] not in [each.session_id for each in await client.sessions()]
        told = await process_status(stack.admin_address("gateway"))
        assert told.numbers['hedgerow_gateway_held{what="sessions"}'] >= 2


async def test_what_is_retained_is_listed_wherever_it_runs_and_when_it_has_ended(
    stack: Stack, models: Models, idle: None
) -> None:
    with another_gateway(stack, models) as other:
        async with (
            AsyncClient(stack.address("gateway"), tenant="retained") as here,
            AsyncClient(other, tenant="retained") as there,
            running(here, 1) as first,
            running(there, 1) as second,
        ):
            ended = (await here.complete(PROMPT, max_tokens=5, ignore_eos=True)).session_id
            found = await there.stored_sessions()
            assert [each.session_id for each in found] == [ended, *second, *first], "the newest first"
            assert [each.status for each in found] == ["ended", "running", "running"]
            assert [each.finish_reason for each in found] == ["length", "running", "running"]
            assert (found[0].token_count, found[0].max_tokens, found[0].tenant) == (5, 5, "retained")
            assert [each.session_id for each in await here.stored_sessions(most=2)] == [ended, *second]
            owners = (await process_status(stack.admin_address("gateway"))).facts["owner"]
            assert [each.owner == owners for each in found] == [True, False, True]
            address = ("--tenant", "retained", "--address", stack.address("gateway"))
            lines = hedgerow("sessions", "ls", *address).stdout.splitlines()
            assert [line.split()[:2] for line in lines] == [
                [ended, "length"], [second[0], "running"], [first[0], "running"]
            ]  # fmt: skip
            assert all("tenant retained" in line and f"owner {owners[:8]}" in line for line in (lines[0], lines[2]))
            assert PROMPT not in "".join(lines)
            told = json.loads(hedgerow("sessions", "ls", "--json", "--most", "1", *address).stdout)
            assert (told["session_id"], told["status"]) == (ended, "ended")
            assert len(hedgerow("sessions", "ls", "--running", *address).stdout.splitlines()) == 1
            await there.delete_session(ended)
            assert [each.session_id for each in await here.stored_sessions()] == [*second, *first]
        # a gateway that ends now leaves the last words of its sessions with the verifier, which keeps them for 10 s
        await soon(lambda: verifier_load(stack).held_sequences == 0, 30)


def test_wrong_use_is_named(stack: Stack) -> None:
    address = ("--address", stack.address("gateway"))
    for arguments in (("show",), ("cancel",), ("ls", "an-id")):
        ended = hedgerow("sessions", *arguments, *address)
        assert ended.returncode == 2
        assert "session_id" in ended.stderr
