"""The gateway's configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hedgerow.rpc.server import ServerConfig
from services.gateway.members import AUTO, FOLDER, MEMBERS

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class GatewayConfig(ServerConfig):
    """Where the peers are, and what one client may ask for."""

    # A message of tiny elements takes 60 times its bytes and 70 ms a MiB to parse, on the event loop: 57 MiB of empty
    # chat messages took 3.8 s and 3.4 GB. No request that can be served is larger than its prompt and a little more.
    message_limit: int = field(
        default=8 * MIB,
        metadata={"min": MIB, "max": 1024 * MIB, "help": "bytes of the largest message; more than a prompt may have"},
    )
    tls_client_certs: bool = field(
        default=False, metadata={"help": "with tls_cert: clients must show a certificate of tls_ca"}
    )
    verifier: str = field(metadata={"address": True, "help": "addresses of the verifiers, comma-separated"})
    kvstore: str = field(metadata={"address": True, "help": "addresses of the kvstore's replicas, comma-separated"})
    model_path: Path = field(metadata={"help": "folder with config.json, tiktoken.model and tokenizer_config.json"})
    chat_template: str = field(
        default=AUTO,
        metadata={
            "choices": (AUTO, *MEMBERS, FOLDER),
            "help": "how conversations become prompts: as the member of the family that the folder's configuration "
            "says, as a named one, or by the folder's own template, in a sandbox",
        },
    )
    tenant_secret: str = field(
        default="",
        metadata={
            "help": "key that turns idempotency keys into session ids, the same for all gateways; empty: made at start",
            "secret": True,
        },
    )
    api_keys_file: Path | None = field(
        default=None,
        metadata={
            "help": "file of TENANT KEY lines: every call must carry one of the keys, which decides its tenant; read "
            "again when it changes; empty: no keys, and the tenant is what the metadata says"
        },
    )
    max_sessions: int = field(
        default=1024, metadata={"min": 1, "max": 100_000, "live": True, "help": "sessions that run at once"}
    )
    max_prompt_bytes: int = field(
        default=4 * MIB,
        metadata={"min": 1, "max": 512 * MIB, "live": True, "help": "bytes of a prompt's text, or of its messages"},
    )
    default_max_tokens: int = field(
        default=4096,
        metadata={"min": 1, "max": 1 << 24, "live": True, "help": "max_tokens of a request that names none"},
    )
    client_lag: int = field(
        default=2048,
        metadata={
            "min": 1,
            "max": 1 << 24,
            "live": True,
            "help": "tokens a client may be behind before its sequence is held",
        },
    )
    client_patience: float = field(
        default=60.0, metadata={"min": 0.1, "max": 86_400, "live": True, "help": "seconds for which a sequence is held"}
    )
    store_patience: float = field(
        default=120.0, metadata={"min": 0.1, "max": 3600, "help": "seconds without the store before sessions end"}
    )
    store_answer_seconds: float = field(
        default=5.0,
        metadata={
            "min": 0.1,
            "max": 600,
            "help": "seconds for one kvstore's answer to a call or an append, until the next one is asked",
        },
    )
    verifier_patience: float = field(
        default=3.0,
        metadata={"min": 0.2, "max": 3600, "help": "seconds without a sign of life of a verifier that has work"},
    )
    quiet_seconds: float = field(
        default=5.0,
        metadata={
            "min": 0.5,
            "max": 3600,
            "help": "seconds for which a verifier that goes on may say nothing of a session, until its lease is "
            "checked; after three times as many the verifier is asked for the session again",
        },
    )
    failover_patience: float = field(
        default=120.0,
        metadata={"min": 0.1, "max": 86_400, "help": "seconds for which a session waits for a verifier"},
    )
    verifier_wait_seconds: float = field(
        default=60.0,
        metadata={
            "min": 0,
            "max": 86_400,
            "help": "seconds for which new calls wait while no verifier takes sessions, and the gateway stays ready; "
            "0: they are refused at once",
        },
    )
    fingerprint_policy: str = field(
        default="wait",
        metadata={
            "choices": ("wait", "best_effort"),
            "help": "when no verifier of a session's fingerprint is left: wait for one, or go on elsewhere, marked so",
        },
    )
    fingerprint_patience: float = field(
        default=30.0,
        metadata={"min": 0.1, "max": 86_400, "help": "seconds until a best_effort session goes on elsewhere"},
    )
    lease_seconds: float = field(
        default=4.0,
        metadata={
            "min": 0.2,
            "max": 3600,
            "help": "seconds after which others may take the sessions of a dead gateway; after eight times as many a "
            "session that does not grow is taken from a live one, after two where a client has more than its log",
        },
    )
    orphan_seconds: float = field(
        default=30.0,
        metadata={
            "min": 0.1,
            "max": 86_400,
            "live": True,
            "help": "seconds for which a detached session goes on without a client",
        },
    )
    session_ttl: float = field(
        default=3600.0,
        metadata={"min": 3, "max": 31_536_000, "help": "seconds for which a session is kept after its last token"},
    )


def addresses(text: str) -> tuple[str, ...]:
    """Comma-separated addresses, each once."""
    return tuple(dict.fromkeys(address for part in text.split(",") if (address := part.strip())))
