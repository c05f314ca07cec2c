"""The digest of what a session consists of, formed again from what a gateway sent (DESIGN: the digest).

    d(0) = SHA-256(session id || prompt ids)        d(i+1) = SHA-256(d(i) || token i)

Each is cut to its first 16 bytes; ids are little-endian uint32.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import sha256

SIZE = 16


def digest_of(session_id: str, prompt: Sequence[int], committed: Sequence[int]) -> bytes:
    """d(len(committed)). About half a millisecond for a thousand committed tokens."""
    digest = sha256(session_id.encode() + struct.pack(f"<{len(prompt)}I", *prompt)).digest()[:SIZE]
    for token in committed:
        digest = sha256(digest + token.to_bytes(4, "little")).digest()[:SIZE]
    return digest
