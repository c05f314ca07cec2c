"""The kvstore's configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hedgerow.rpc.server import ServerConfig

DAY = 86_400_000


@dataclass(frozen=True, kw_only=True)
class KvStoreConfig(ServerConfig):
    """Times ending in `_ms` are milliseconds, others seconds."""

    redis_url: str = field(
        metadata={
            "min": 1,
            "secret": True,
            "help": "URL of the Redis to use: redis://, rediss://, unix://, "
            "redis+sentinel://host:port,host:port/service or redis+cluster://host:port,host:port",
        }
    )
    redis_tls_ca: Path | None = field(
        default=None,
        metadata={"help": "authorities (PEM) of Redis' certificate, for rediss:// URLs; empty: the system's"},
    )
    redis_tls_cert: Path | None = field(
        default=None, metadata={"help": "certificate chain (PEM) that is shown to Redis; empty: none"}
    )
    redis_tls_key: Path | None = field(default=None, metadata={"help": "its private key (PEM, no passphrase)"})
    redis_timeout: float = field(
        default=1.0, metadata={"min": 0.01, "max": 60, "help": "seconds that Redis may take to answer"}
    )
    redis_connections: int = field(
        default=32, metadata={"min": 1, "max": 4096, "help": "connections to each Redis server"}
    )
    redis_wait_replicas: int = field(
        default=0,
        metadata={
            "min": 0,
            "max": 64,
            "help": "replicas that have an append before it counts (WAIT); 0: none is asked",
        },
    )
    redis_wait_ms: int = field(
        default=500, metadata={"min": 1, "max": 60_000, "help": "how long an append waits for them"}
    )
    session_ttl_ms: int = field(
        default=3_600_000, metadata={"min": 1000, "max": 365 * DAY, "help": "life of a session after its last append"}
    )
    tombstone_ms: int = field(
        default=DAY,
        metadata={"min": 1000, "max": 365 * DAY, "help": "what is left of a session is known this much longer"},
    )
    lease_ms: int = field(
        default=10_000, metadata={"min": 100, "max": 600_000, "help": "life of an owner after it renewed"}
    )
    tail_poll_ms: int = field(
        default=20, metadata={"min": 1, "max": 10_000, "help": "how often sessions that are followed are looked at"}
    )
    max_prompt: int = field(default=262_144, metadata={"min": 1, "max": 1 << 24, "help": "tokens of a prompt"})
    max_entries: int = field(default=1024, metadata={"min": 1, "max": 65_536, "help": "entries of one append message"})
    max_tokens: int = field(default=65_536, metadata={"min": 1, "max": 1 << 24, "help": "tokens of one append entry"})
    max_view_bytes: int = field(
        default=1 << 20,
        metadata={"min": 0, "max": 1 << 28, "help": "bytes of log-probabilities and statistics an entry"},
    )
    max_blocks: int = field(default=8192, metadata={"min": 1, "max": 1 << 20, "help": "prefix blocks of one call"})
