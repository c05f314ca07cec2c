"""The digest chain of a session: proof of its whole text in 16 bytes, per token, so that chunk borders do not matter.

    d(0) = SHA-256(session id || prompt ids)        d(i+1) = SHA-256(d(i) || token i)

Each is cut to its first 16 bytes, which are what the next one hashes. Ids are little-endian uint32; the session id is
its UTF-8 text. The gateway forms it, and the verifier again from what it is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256
from struct import Struct, pack

SIZE = 16
_ID = Struct("<I")


def first(session_id: str, prompt: Sequence[int]) -> bytes:
    """The digest at offset 0."""
    return sha256(session_id.encode() + pack(f"<{len(prompt)}I", *prompt)).digest()[:SIZE]


def extend(digest: bytes, tokens: Iterable[int]) -> bytes:
    """The digest after `tokens`, from the one before them. About half a millisecond for a thousand tokens."""
    for token in tokens:
        digest = sha256(digest + _ID.pack(token)).digest()[:SIZE]
    return digest
