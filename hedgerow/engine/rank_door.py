"""Where the ranks of a group's other hosts come to its first one."""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from hedgerow.engine.rank_channels import RemoteRank
from hedgerow.engine.rank_process import BEAT
from hedgerow.engine.rank_tls import Cipher, Context
from hedgerow.engine.rank_wire import Claim, WireError, admit

log = logging.getLogger(__name__)
PROOF_WITHIN = 5.0  # seconds for a newcomer's first words
MOST_AT_ONCE = 64  # newcomers that have not proved anything yet
REMINDER = 10.0  # seconds between two lines that say who is missing
SPEAKS = 1  # version of what first host and others say to each other


class Split(NamedTuple):
    """`ranks` ranks on `hosts` hosts, as many on each, in the hosts' order."""

    ranks: int
    hosts: int = 1

    @property
    def each(self) -> int:
        return self.ranks // self.hosts

    def of(self, host: int) -> range:
        """The ranks of a host."""
        return range(host * self.each, (host + 1) * self.each)

    def judge(self, claim: Claim) -> str:
        """What is wrong with a newcomer; "" if nothing is."""
        if claim.get("speaks") != SPEAKS:
            return f"this host speaks version {SPEAKS}, not {claim.get('speaks')}: one image for all of a group"
        ranks, hosts = claim.get("ranks"), claim.get("hosts")
        if ranks != self.ranks or hosts != self.hosts:
            return f"this group has {self.ranks} ranks on {self.hosts} hosts, not {ranks} on {hosts}"
        host, rank = claim.get("host"), claim.get("rank")
        if not (isinstance(host, int) and 0 < host < self.hosts and rank in self.of(host)):
            return f"rank {rank} of host {host} is none of this group"
        return ""


class Door:
    """Bound when it is made. `address`: host:port; port 0 takes a free one. `tls`: what is shown, and asked of who
    comes; None: without. Raises OSError, ValueError."""

    def __init__(self, address: str, secret: bytes, split: Split, tls: Context | None = None) -> None:
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, int(port)), family=family, backlog=MOST_AT_ONCE)
        self._listening.setblocking(False)
        self._secret, self._split, self._tls = secret, split, tls
        self._came: dict[int, RemoteRank] = {}
        self._turn, self._busy = threading.Lock(), threading.BoundedSemaphore(MOST_AT_ONCE)
        self._closed = False

    @property
    def port(self) -> int:
        return int(self._listening.getsockname()[1])

    def gather(self, waiting: Callable[[], None]) -> dict[int, RemoteRank]:
        """All ranks of the other hosts, by number; the door is closed then. One that goes meanwhile may come again.

        `waiting` is called every BEAT seconds; it raises where that is in vain.
        """
        missing, told = self._missing(), -REMINDER
        with selectors.DefaultSelector() as ready:
            ready.register(self._listening, selectors.EVENT_READ)
            while missing:
                if time.monotonic() - told > REMINDER:
                    told = time.monotonic()
                    log.info("the group waits for %s", ", ".join(f"host {host}" for host in missing))
                if ready.select(BEAT):
                    self._accept()
                waiting()
                self._look()
                missing = self._missing()
        with self._turn:
            self._closed = True
            self._listening.close()
            return dict(self._came)

    def close(self) -> None:
        """Of those that came, too."""
        with self._turn:
            self._closed = True
            self._listening.close()
            for rank in self._came.values():
                rank.close()

    def _missing(self) -> list[int]:
        with self._turn:
            return [host for host in range(1, self._split.hosts) if not self._came.keys() >= {*self._split.of(host)}]

    def _accept(self) -> None:
        try:
            connection, peer = self._listening.accept()
        except OSError:  # it went again
            return
        if not self._busy.acquire(blocking=False):
            connection.close()
            return
        threading.Thread(target=self._admit, args=(connection, str(peer[0])), daemon=True).start()

    def _admit(self, connection: socket.socket, peer: str) -> None:
        try:
            cipher = None if self._tls is None else Cipher(self._tls(), None)
            wire, claim = admit(connection, self._secret, self._split.judge, PROOF_WITHIN, cipher)
        except (OSError, ValueError) as error:
            log.warning("%s is not let into the group: %s", peer, error)
            connection.close()
            return
        finally:
            self._busy.release()
        rank = RemoteRank(claim["rank"], claim["host"], wire)
        with self._turn:
            if self._closed:
                rank.close()
                return
            old = self._came.get(claim["rank"])
            self._came[claim["rank"]] = rank
        if old is not None:  # its host started anew and the network has not told of it
            old.close()
        log.info("%s came from %s", rank.name, peer)

    def _look(self) -> None:
        """Those that came hear that this host lives, and those that went are no longer here."""
        with self._turn:
            for number, rank in [*self._came.items()]:
                try:
                    rank.beat()
                    rank.wire.read()
                except WireError as error:
                    log.info("%s went again: %s", rank.name, error)
                    rank.close()
                    del self._came[number]
