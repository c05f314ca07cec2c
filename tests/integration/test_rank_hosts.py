"""A group on two hosts with an address each: one process with as many shards, bit for bit; and what a loss does."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from hedgerow.engine.rank_door import Door, Split
from hedgerow.engine.rank_target import GroupTarget
from hedgerow.engine.ranks import RankGroup
from hedgerow.errors import Unavailable
from hedgerow.model.k2 import K2Model
from hedgerow.model.ranked import RankEngine
from kernels.collectives import Ranks
from tests.polling import eventually
from tests.rank_host import SECRET, Host, hosts
from tests.tiny import write_target
from tests.unit.test_rank_group import TARGET, alive, step

TWO = Split(2, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    write_target(folder, TARGET)
    return folder


@contextmanager
def led(
    folder: Path, door: Door, split: Split = TWO, engine: RankEngine = "torch"
) -> Iterator[tuple[GroupTarget, list[str], list[str]]]:
    """The first host's group, why it was lost, and who said that it leaves."""
    lost: list[str] = []
    leaving: list[str] = []
    made = RankGroup(
        folder, split.ranks, on_lost=lost.append, engine=engine, feature_layers=(1, 2), hosts=split.hosts, door=door,
        on_leaving=leaving.append,
    )  # fmt: skip
    target = made.load()
    try:
        yield target, lost, leaving
    finally:
        made.close()
        assert not [pid for pid in made.pids if alive(pid)], "a rank outlived its group"


def door(split: Split = TWO, port: int = 0) -> Door:
    return Door(f"127.0.0.1:{port}", SECRET.encode(), split)


def equal(target: GroupTarget, folder: Path, count: int) -> None:
    one = K2Model.load(folder, (1, 2), ranks=Ranks(count))
    assert (target.kernel_law, target.checkpoint_hash) == (one.kernel_law, one.checkpoint_hash)
    for there, here in zip(step(target), step(one), strict=True):
        assert torch.equal(there, here)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("split", [TWO, pytest.param(Split(4, 2), marks=pytest.mark.long)], ids=str)
def test_two_hosts_have_the_bits_of_shards_in_one_process(folder: Path, tmp_path: Path, split: Split) -> None:
    at = door(split)
    other = Host(at.port, folder, split=split, out=tmp_path)
    with hosts(other), led(folder, at, split) as (target, lost, _):
        assert len(other.ranks()) == split.each
        equal(target, folder, split.ranks)
    assert not lost


@pytest.mark.timeout(240)
@pytest.mark.parametrize("what", ["rank", "host"])
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)], ids=["killed", "stopped"]
)
def test_what_is_lost_on_another_host_takes_the_group_down_and_comes_back(
    folder: Path, tmp_path: Path, what: str, number: signal.Signals
) -> None:
    """Soon. Then the first host begins anew, as its service does, and the other one joins it again."""
    at = door()
    port, other = at.port, Host(at.port, folder, out=tmp_path)
    with hosts(other):
        with led(folder, at) as (target, lost, _):
            step(target)
            before = other.ranks()
            os.kill(before[0] if what == "rank" else other.process.pid, number)
            began = time.monotonic()
            eventually(lambda: lost, 20, "the loss of a rank")
            print(f"{what} {number.name}: {time.monotonic() - began:.1f} s, {lost}")
            assert "rank 1 on host 1" in lost[0]
            with pytest.raises(Unavailable, match="rank 1 on host 1"):
                step(target)
        if what == "host" and number == signal.SIGKILL:
            eventually(lambda: not any(map(alive, before)), 20, "its ranks end with it")
            other = Host(port, folder, out=tmp_path)
        if what == "host" and number == signal.SIGSTOP:
            os.kill(other.process.pid, signal.SIGCONT)
        with hosts(other), led(folder, door(port=port)) as (target, lost, _):
            assert other.ranks() != before
            equal(target, folder, 2)
        assert not lost
        eventually(lambda: not any(map(alive, before)), 20, "the end of what was lost")


@pytest.mark.timeout(240)
def test_a_host_ends_its_ranks_with_the_first_host_and_joins_the_next(folder: Path, tmp_path: Path) -> None:
    at = door()
    port, other = at.port, Host(at.port, folder, out=tmp_path)
    with hosts(other):
        with led(folder, at) as (_, lost, _leaving):
            before = other.ranks()
        assert not lost
        eventually(lambda: not other.ranks(), 20, "the end of its ranks")
        eventually(lambda: "this host is not in the group" in other.text, 20, "a line that says so")
        with led(folder, door(port=port)) as (target, _, _leaving):
            assert len(other.ranks()) == 1
            assert other.ranks() != before
            equal(target, folder, 2)


def refused(port: int, folder: Path, tmp_path: Path, why: str, **named: object) -> None:
    other = Host(port, folder, out=tmp_path, **named)  # type: ignore[arg-type]
    with hosts(other):
        eventually(lambda: why in other.text, 20, f"{why!r}, in {other.text}")
        assert not other.ranks()


@pytest.mark.timeout(240)
def test_strangers_stay_outside_and_the_group_comes_about(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another secret, another shape of the group, one that never says a word, and noise."""
    caplog.set_level("INFO")
    at = door()
    made = RankGroup(folder, 2, feature_layers=(1, 2), hosts=2, door=at)
    try:
        silent = socket.create_connection(("127.0.0.1", at.port))
        with silent, socket.create_connection(("127.0.0.1", at.port)) as noise:
            noise.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(200))
            refused(at.port, folder, tmp_path, "broke off", secret="another secret of a test")
            refused(at.port, folder, tmp_path, "this group has 2 ranks on 2 hosts, not 4 on 2", split=Split(4, 2))
            other = Host(at.port, folder, out=tmp_path)
            with hosts(other):
                equal(made.load(), folder, 2)
        said = caplog.text
        for why in ("it has not the group's secret", "does not speak as a rank does", "not 4 on 2"):
            assert why in said, why
        assert SECRET not in said + other.text
    finally:
        made.close()


@pytest.mark.timeout(240)
def test_a_host_with_another_checkpoint_is_named(folder: Path, tmp_path: Path) -> None:
    write_target(tmp_path / "other", dataclasses.replace(TARGET, theta=10000.0))
    at = door()
    lost: list[str] = []
    made = RankGroup(folder, 2, on_lost=lost.append, feature_layers=(1, 2), hosts=2, door=at)
    other = Host(at.port, tmp_path / "other", out=tmp_path)
    with hosts(other), pytest.raises(Unavailable, match="rank 1 on host 1 has the checkpoint"):
        made.load()
    assert len(lost) == 1


def test_what_an_address_cannot_be_bound_to_is_said() -> None:
    with pytest.raises(OSError, match=r"Cannot assign|assign requested"):
        Door("192.0.2.77:0", SECRET.encode(), TWO)


def test_folders_differ_by_host(folder: Path, tmp_path: Path) -> None:
    """Each host reads its own disk."""
    shutil.copytree(folder, tmp_path / "elsewhere")
    at = door()
    other = Host(at.port, tmp_path / "elsewhere", out=tmp_path)
    with hosts(other), led(folder, at) as (target, _, _leaving):
        equal(target, folder, 2)
