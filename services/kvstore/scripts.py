"""Scripts on Redis, and the calls of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "scripts"


class Script:
    """A script of a session (`shared`: session.lua stands before it) or one that stands alone."""

    def __init__(self, name: str, *, shared: bool = True) -> None:
        first, _, rest = (FOLDER / f"{name}.lua").read_text().partition("\n")
        assert first.startswith("#!lua"), (
            "without it Redis checks neither memory nor keys before the script's first write"
        )
        prelude = (FOLDER / "session.lua").read_text() if shared else ""
        self.name = name
        self.source = f"{first}\n{prelude}{rest}".encode()
        # SHA-1 is how Redis names scripts.
        self.sha = hashlib.sha1(self.source, usedforsecurity=False).hexdigest().encode()


class Call(NamedTuple):
    """One call of a script; its keys have one hash tag."""

    script: Script
    keys: Sequence[bytes]
    arguments: Sequence[bytes]


class Plain(NamedTuple):
    """A command that needs no script, and a key that tells where it belongs."""

    words: Sequence[bytes]
    key: bytes
