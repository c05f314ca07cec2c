"""The names of everything in Redis. Each key has one hash tag: a cluster keeps what belongs together on one node.

hedgerow:{<session>}:record, :log, :mark              a session, see scripts/session.lua
hedgerow:{owner-<hex>}:alive, :cancelled, :sessions   an owner: whether it lives, its sessions with a cancel mark, all
                                                      its running sessions
hedgerow:{owners-<shard>}                             owners by the end of their lives
hedgerow:{released-<shard>}                           running sessions that nobody owns
hedgerow:{tenant-<hash>}:sessions                     a tenant's sessions, those that are gone for a while too
hedgerow:prefix:{<hash>}                              a prefix block's holders
"""

from __future__ import annotations

import hashlib
import zlib
from typing import NamedTuple

SHARDS = 16
"""Shards of the indexes that are not an owner's own. Data outlives a process: never change it."""
CANCELS = b"hedgerow:cancels"
"""The channel on which cancel marks are told: an owner's 16 bytes, and a session's id."""


class OwnerKeys(NamedTuple):
    """What is kept of an owner."""

    alive: bytes
    cancelled: bytes
    sessions: bytes


def session_keys(session_id: str) -> tuple[bytes, bytes, bytes]:
    """Record, log and mark of a session."""
    tag = b"hedgerow:{%b}:" % session_id.encode()
    return tag + b"record", tag + b"log", tag + b"mark"


def owner_keys(owner: bytes) -> OwnerKeys:
    """The keys of an owner."""
    tag = b"hedgerow:{owner-%b}:" % owner.hex().encode()
    return OwnerKeys(tag + b"alive", tag + b"cancelled", tag + b"sessions")


def owners_key(shard: int) -> bytes:
    """The owners of one shard."""
    return b"hedgerow:{owners-%d}" % shard


def owner_shard(owner: bytes) -> int:
    """The shard that lists an owner, which is random bytes."""
    return owner[0] % SHARDS


def tenant_key(tenant: str) -> bytes:
    """The sessions of a tenant, whose name may have anything in it."""
    return b"hedgerow:{tenant-%b}:sessions" % hashlib.sha256(tenant.encode()).hexdigest()[:32].encode()


def released_key(shard: int) -> bytes:
    """The released sessions of one shard."""
    return b"hedgerow:{released-%d}" % shard


def session_shard(session_id: str) -> int:
    """The shard that lists a session while nobody owns it."""
    return zlib.crc32(session_id.encode()) % SHARDS
