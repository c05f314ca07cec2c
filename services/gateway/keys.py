"""The file of API keys: one line a key, `TENANT KEY [LIMIT=NUMBER ...]`, # begins a comment line.

    acme  sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08  concurrent=64 requests_per_minute=600
    acme  sha256:60303ae22b998861bce3b28f33eec1be758a213c86c93c076dbe9f558c11e752
    lab   a-key-of-32-characters-as-it-is

A key stands there as it is, or, better, as its SHA-256. Keys must be random: a hash without salt hides no password.
Limits are the tenant's; they may stand on any one of its lines. Errors name file, line, field and limit, never a key.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hedgerow.rpc.config import ConfigError, read_lines
from services.gateway.limits import KEY_BYTES, PRIORITY

MOST_KEYS = 20_000  # 6 us each to read, in a thread
LEAST, MOST = 16, 256  # characters of a key
HASHED = "sha256:"
PREFIX = 4  # bytes of a hash by which candidates are found
_TENANT = re.compile(rf"[!-~]{{1,{KEY_BYTES}}}")
_KEY = re.compile(rf"[!-~]{{{LEAST},{MOST}}}")
RANGES = {
    "concurrent": (1, 1_000_000),
    "requests_per_minute": (1, 100_000_000),
    "max_priority": (-PRIORITY, PRIORITY),
}


@dataclass(frozen=True)
class Tenant:
    """Whose calls they are, and how many may be made of one gateway; None: as many as it takes.

    `concurrent`: generations at once, those without a client too. `requests_per_minute`: new ones, and tokenizations;
    as many may come at once. `max_priority`: a request that names none is lowered to it.
    """

    name: str
    concurrent: int | None = None
    requests_per_minute: int | None = None
    max_priority: int | None = None


class Keys:
    """Tenants by the SHA-256 of their keys."""

    def __init__(self, tenants: Mapping[bytes, Tenant]) -> None:
        self._tenants = dict(tenants)
        self._near: dict[bytes, list[bytes]] = {}
        for digest in self._tenants:
            self._near.setdefault(digest[:PREFIX], []).append(digest)

    def __len__(self) -> int:
        return len(self._tenants)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keys) and self._tenants == other._tenants

    __hash__ = None  # type: ignore[assignment]

    def tenant(self, key: str) -> Tenant | None:
        """Whose key it is; None: nobody's. The time that this takes tells of a hash's first bytes at most."""
        digest = hashlib.sha256(key.encode()).digest()
        for known in self._near.get(digest[:PREFIX], ()):
            if hmac.compare_digest(known, digest):
                return self._tenants[known]
        return None


def read_keys(path: Path) -> Keys:
    """The file's keys. Raises ConfigError."""
    keys: dict[bytes, Tenant] = {}
    lines: dict[bytes, int] = {}
    limits: dict[str, dict[str, int]] = {}
    for number, line in read_lines(path):
        at = f"{path}, line {number}"
        name, *rest = line.split()
        if not rest:
            raise ConfigError(at, "this", "must be TENANT KEY [LIMIT=NUMBER ...]")
        if not _TENANT.fullmatch(name):
            raise ConfigError(f"{at}: tenant", "this", f"must be printable ASCII, at most {KEY_BYTES} characters")
        digest = _digest(at, rest[0])
        if digest in lines:
            raise ConfigError(f"{at}: key", "this", f"it is that of line {lines[digest]}")
        lines[digest], keys[digest] = number, Tenant(name)
        _merge(at, limits.setdefault(name, {}), rest[1:])
    if not keys:
        raise ConfigError(str(path), "the file", "must have a key")
    if len(keys) > MOST_KEYS:
        raise ConfigError(str(path), f"{len(keys)} keys", f"at most {MOST_KEYS}")
    tenants = {name: Tenant(name, **given) for name, given in limits.items()}
    return Keys({digest: tenants[tenant.name] for digest, tenant in keys.items()})


def _digest(at: str, text: str) -> bytes:
    if text.startswith(HASHED):
        if not re.fullmatch(r"[0-9a-fA-F]{64}", text.removeprefix(HASHED)):
            raise ConfigError(f"{at}: key", "this", f"behind {HASHED} must be 64 hexadecimal digits")
        return bytes.fromhex(text.removeprefix(HASHED))
    if not _KEY.fullmatch(text):
        raise ConfigError(f"{at}: key", "this", f"must be {LEAST} to {MOST} printable ASCII characters")
    return hashlib.sha256(text.encode()).digest()


def _merge(at: str, limits: dict[str, int], words: list[str]) -> None:
    """Adds one line's limits to its tenant's."""
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or name not in RANGES:
            raise ConfigError(at, "a word behind the key", f"must be LIMIT=NUMBER with one of {', '.join(RANGES)}")
        low, high = RANGES[name]
        number = int(text) if re.fullmatch(r"-?\d{1,9}", text) else None
        if number is None or not low <= number <= high:
            shown = "this" if number is None else text  # a misplaced key is not shown
            raise ConfigError(f"{at}: {name}", shown, f"must be a whole number in [{low}, {high}]")
        if limits.setdefault(name, number) != number:
            raise ConfigError(f"{at}: {name}", text, f"this tenant's is {limits[name]} on another line")
