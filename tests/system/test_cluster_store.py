"""The bundled store in a cluster, operated by the words of the pages, with streams in flight."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.store_commands import documented
from tests.system.cluster import CHOSEN, RELEASE, Cluster, Failed, started, unbroken
from tests.system.tools import CHART

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]
STORE = f"{RELEASE}-redis-0"


@pytest.fixture(scope="module")
def release() -> Iterator[Cluster]:
    """The laptop's profile, ready, with a volume."""
    with started("stored") as made:
        made.claim(f"data-{STORE}")
        made.install()
        made.settle()
        yield made


def operate(release: Cluster, words: str) -> str:
    """In the store's pod, as docs/operations.md has it."""
    return release.kubectl("exec", "-i", STORE, "-c", "valkey", "--", "hedgerow-store", *words.split())


def hedgerow(release: Cluster, *words: str) -> Any:
    """A command of the client's, and the JSON that it prints."""
    command = [sys.executable, "-m", "hedgerow.cli", *words, "--address", release.address()]
    return json.loads(release.run("exec", *command))


def test_the_stores_operator_does_what_the_pages_say(release: Cluster) -> None:
    """And a copy of the store, laid down again, has what it had."""
    release.run("exec", sys.executable, "-m", "hedgerow.cli", "generate", "import os", "--address", release.address())
    session_id = hedgerow(release, "sessions", "ls", "--json", "--most", "1")["session_id"]
    recorded = hedgerow(release, "session", session_id)
    assert recorded["token_count"] > 0
    for words in documented():
        if not words.startswith("--"):
            assert "ERR" not in operate(release, words), words
    release.until(lambda: "aof_rewrite_in_progress:0" in operate(release, "INFO persistence"), 30, "the rewrite")
    operate(release, "CONFIG SET maxmemory 256mb")
    store = ["exec", "-i", STORE, "-c", "valkey", "--", "sh", "-c"]
    copied = release.kubectl(*store, "tar -C /data -cf - appendonlydir | base64")
    with contextlib.suppress(Failed):  # the container ends under the command
        release.kubectl(*store, "rm -rf /data/appendonlydir && base64 -d | tar -C /data -xf - && kill 1", given=copied)
    release.until(lambda: restarts(release) == 1, 60, "the store starts anew")
    release.settle()

    def same() -> bool:
        with contextlib.suppress(Failed):  # the gateways find the store again
            return bool(hedgerow(release, "session", session_id)["digest"] == recorded["digest"])
        return False

    release.until(same, 60, "a session of the copy")


def restarts(release: Cluster) -> int:
    """Of the store's container."""
    return int(release.get("pod", STORE)["status"]["containerStatuses"][0]["restartCount"])


def test_the_stores_password_changes_under_streams(release: Cluster) -> None:
    """Both are good until the next upgrade; Redis is not restarted."""
    word = "anotherPasswordOfLettersAndDigits0"
    hashed = hashlib.sha256(word.encode()).hexdigest()
    before = (release.get("pod", STORE)["metadata"]["uid"], restarts(release))
    with release.streams(8, 250) as streams:
        release.helm("upgrade", RELEASE, str(CHART), *CHOSEN, "--set", f"secrets.redisPassword={word}")
        command = ["exec", STORE, "-c", "valkey", "--", "cat", "/etc/valkey/users.acl"]
        release.until(lambda: hashed in release.kubectl(*command), 150, "the file in the store's pod")
        streams.wait_running()
        operate(release, "ACL LOAD")
        release.kubectl("rollout", "status", f"deployment/{RELEASE}-kvstore", "--timeout=120s", timeout=150)
        release.settle()
        streams.wait_running()
        release.install()
        unbroken(streams.finish())
    assert (release.get("pod", STORE)["metadata"]["uid"], restarts(release)) == before
    users = base64.b64decode(release.get("secret", f"{RELEASE}-secrets")["data"]["users.acl"]).decode()
    assert users.splitlines()[1].count("#") == 1
    assert hashed in users
