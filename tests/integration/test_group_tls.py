"""A group on two hosts over TLS: the same bits, nothing for who listens in between, and who is not let in and why."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hedgerow.certificates import Tls, server_context
from hedgerow.cli.ports import free_ports
from hedgerow.cli.supervisor import Stack, StackConfig
from hedgerow.client import AsyncClient, Retry
from hedgerow.engine.rank_door import Door, Split
from hedgerow.engine.ranks import RankGroup
from hedgerow.model.k2 import K2Model
from kernels.collectives import Ranks
from tests.certificates import Authority, Files
from tests.integration.test_group_hosts import member
from tests.integration.test_tensor_parallel import OPTIONS, ROOT, TARGET
from tests.polling import eventually
from tests.rank_host import SECRET, Host, hosts
from tests.stack import Models, Plain, engine_sampling
from tests.tiny import TinyPaths, write_tiny
from tests.unit.test_rank_group import TARGET as STEP_TARGET
from tests.unit.test_rank_group import step

PROMPT = [1, 2, 3, 4, 5]
SERVICES = ("gateway", "verifier", "drafter", "kvstore")
pytestmark = [pytest.mark.timeout(240), pytest.mark.long]  # `test_rank_tls.py` has the core of it


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("step"), STEP_TARGET).target


class Between:
    """Somebody on the way to the first host, who passes everything on and keeps it."""

    def __init__(self, port: int) -> None:
        self.seen = bytearray()
        self._to, self._listening = port, socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                for pair in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                to.sendall(data)
        for each in (source, to):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def reads_tokens(seen: bytes) -> bool:
    """Whether the prompt of `step` is in it: its tokens in a row, each a byte of its kind and four of its value."""
    tokens = [(11 * i + 5) % STEP_TARGET.vocab for i in range(10)]
    return (
        re.search(b"".join(b"." + re.escape(struct.pack("<i", each)) for each in tokens), seen, re.DOTALL) is not None
    )


def tls(files: Files) -> Tls:
    return Tls(files.ca, files.cert, files.key)


@pytest.mark.parametrize("over_tls", [True, False])
def test_the_bits_of_one_process_and_prompts_that_nobody_reads(
    folder: Path, tmp_path: Path, authority: Authority, over_tls: bool
) -> None:
    files = authority.issue("group") if over_tls else None
    door = Door(
        "127.0.0.1:0", SECRET.encode(), Split(2, 2), None if files is None else lambda: server_context(tls(files))
    )
    between = Between(door.port)
    made = RankGroup(folder, 2, feature_layers=(1, 2), hosts=2, door=door)
    try:
        with hosts(Host(between.port, folder, out=tmp_path, files=files)):
            target, one = made.load(), K2Model.load(folder, (1, 2), ranks=Ranks(2))
            assert (target.kernel_law, target.checkpoint_hash) == (one.kernel_law, one.checkpoint_hash)
            for there, here in zip(step(target), step(one), strict=True):
                assert torch.equal(there, here)
    finally:
        made.close()
        between.close()
    assert len(between.seen) > 1000
    assert reads_tokens(bytes(between.seen)) is not over_tls


def test_strangers_stay_outside_and_the_group_comes_about(
    folder: Path, tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """One without TLS, an expired certificate, another authority's, one that never says a word: each has the secret."""
    caplog.set_level("INFO")
    good, expired = authority.issue("good"), authority.issue("expired", days=-1)
    other = Authority(tmp_path / "other").issue("stranger")
    door = Door("127.0.0.1:0", SECRET.encode(), Split(2, 2), lambda: server_context(tls(good)))
    made = RankGroup(folder, 2, feature_layers=(1, 2), hosts=2, door=door)
    cases = [
        (None, "it speaks over TLS: HEDGEROW_TLS_CERT is set there and not here", "it speaks without TLS"),
        (expired, "the other end refuses the certificate that it is shown: certificate expired", "has expired"),
        (Files(other.cert, other.key, good.ca), "refuses the certificate that it is shown: unknown ca", "local issuer"),
        (other, "the other end's certificate is refused", "refuses the certificate that it is shown: unknown ca"),
    ]
    try:
        with socket.create_connection(("127.0.0.1", door.port)):
            for number, (files, theirs, ours) in enumerate(cases):
                (tmp_path / str(number)).mkdir()
                host = Host(door.port, folder, out=tmp_path / str(number), files=files)
                with hosts(host):
                    eventually(lambda host=host, why=theirs: why in host.text, 60, f"{theirs!r}")
                    assert not host.ranks()
                eventually(lambda why=ours: why in caplog.text, 20, f"{ours!r}")
            assert "127.0.0.2 is not let into the group" in caplog.text
            with hosts(Host(door.port, folder, out=tmp_path, files=good)):
                assert made.load().checkpoint_hash
    finally:
        made.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> TinyPaths:
    return write_tiny(tmp_path_factory.mktemp("models"), TARGET)


@pytest.fixture(scope="module")
def secured(models: TinyPaths, authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """All services with TLS, by their settings; the verifier is the first of two hosts."""
    files, leader = authority.issue("services"), f"127.0.0.1:{next(iter(free_ports(1)))}"
    settings = {name: {key.upper(): str(value) for key, value in files.settings().items()} for name in SERVICES}
    settings["gateway"]["TLS_CLIENT_CERTS"] = "false"
    settings["verifier"] |= {
        "TENSOR_PARALLEL": "2", "GROUP_HOSTS": "2", "GROUP_LISTEN": leader, "GROUP_SECRET": SECRET
    }  # fmt: skip
    other = member(models, leader, group_secret=SECRET, **authority.issue("member").settings())
    other.start()
    data = tmp_path_factory.mktemp("data")
    try:
        with Stack(StackConfig(ROOT, models.target, data, drafter=models.drafter, settings=settings)) as stack:
            yield stack
    finally:
        other.stop(20)


async def test_trees_over_two_hosts_give_the_tokens_of_one_rank(
    secured: Stack, models: TinyPaths, authority: Authority
) -> None:
    async with AsyncClient(secured.address("gateway"), tls=Tls(authority.cert), retry=Retry(total=100)) as client:
        stream = client.generate(PROMPT, budget=8, max_tokens=48, **OPTIONS)
        found = [token async for chunk in stream for token in chunk.tokens]
        assert stream.started is not None
        sampling = engine_sampling(stream.started.sampling)
    one = K2Model.load(models.target, models.feature_layers, ranks=Ranks(2))
    plain = Plain(Models(models.target, models.drafter, models.feature_layers, bundled=False), one)
    assert len(found) == 48
    assert found == plain.tokens(PROMPT, sampling)


def test_gloo_has_no_tls_of_its_own_as_the_docs_say() -> None:
    """Where this fails, the sums of ranks can be encrypted, too: docs/security.md, Hosts of one group."""
    if not torch.__version__.endswith("+cpu"):
        pytest.skip("it is said of the wheels for CPUs alone")
    code = "import torch.distributed as d; d.ProcessGroupGloo.create_device(hostname='127.0.0.1')"
    env = os.environ | {"GLOO_DEVICE_TRANSPORT": "TCP_TLS"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert "unsupported gloo device" in done.stderr
