"""The family's vocabulary in tests: the published one where this machine has it, the bundled one everywhere.

`KIMI_VOCABULARY` names a folder with the published `tiktoken.model` (163,584 ranks) and `tokenizer_config.json`. It is
too large for this repository; tests that need it are skipped by name without it.
"""

from __future__ import annotations

import base64
import functools
import json
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import tiktoken

from services.gateway.tokenizer import SPECIAL_TOKENS, Tokenizer

ROOT = Path(__file__).resolve().parents[1]
BUNDLED = ROOT / "models" / "sapling"
KIMI = Path(os.environ.get("KIMI_VOCABULARY") or ROOT.parent / "shared" / "data" / "kimi")
NEEDS_KIMI = pytest.mark.skipif(not (KIMI / "tiktoken.model").exists(), reason=f"no published vocabulary at {KIMI}")
# The published pattern, letter by letter (tokenization_kimi.py of Kimi-K2 to K2.6), not ours.
PUBLISHED = "|".join(
    [
        r"""[\p{Han}]+""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)
THINK_AND_MEDIA = range(602 - 584, 608 - 584)  # places that K2-Instruct has no names for
MARKER = re.compile(r"<\|\w+\|>|</?think>|\[[A-Z]+\]")


def load_kimi() -> Tokenizer:
    """The published one."""
    return tokenizer_of(KIMI)


def load_bundled() -> Tokenizer:
    """The bundled one: the same format, 3,840 ranks, the same 256 special tokens above them."""
    return tokenizer_of(BUNDLED)


@functools.cache
def published(folder: Path) -> tiktoken.Encoding:
    """tiktoken with the published pattern and all special tokens, as the published tokenizer has it."""
    lines = (folder / "tiktoken.model").read_bytes().splitlines()
    ranks = {base64.b64decode(piece): int(rank) for piece, rank in (line.split() for line in lines)}
    added = json.loads((folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    places = range(len(ranks), len(ranks) + SPECIAL_TOKENS)
    special = {added.get(str(i), {"content": f"<|reserved_token_{i}|>"})["content"]: i for i in places}
    return tiktoken.Encoding("published", pat_str=PUBLISHED, mergeable_ranks=ranks, special_tokens=special)


def without_think(folder: Path, to: Path) -> Path:
    """A folder like K2-Instruct's: the same ranks, and no names for think and media tokens."""
    config = json.loads((folder / "tokenizer_config.json").read_text())
    ranks = len((folder / "tiktoken.model").read_bytes().splitlines())
    for place in THINK_AND_MEDIA:
        config["added_tokens_decoder"].pop(str(ranks + place), None)
    to.mkdir(exist_ok=True)
    (to / "tokenizer_config.json").write_text(json.dumps(config))
    (to / "tiktoken.model").write_bytes((folder / "tiktoken.model").read_bytes())
    return to


@functools.cache
def tokenizer_of(folder: Path, *, thinks: bool = True) -> Tokenizer:
    """A folder's, made once for all tests; `thinks=False`: as K2-Instruct has it."""
    if thinks:
        return Tokenizer.from_folder(folder)
    with tempfile.TemporaryDirectory() as other:
        return Tokenizer.from_folder(without_think(folder, Path(other)))


def spelled(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Ids as text, markers by their names."""
    names = {tokenizer.special(name): name.encode() for name in tokenizer.special_names}
    return b"".join(names.get(token) or tokenizer.pieces[token] for token in ids).decode()


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text in which markers are markers."""
    ids: list[int] = []
    at = 0
    for found in MARKER.finditer(text):
        if found[0] in tokenizer.special_names:
            ids += tokenizer.encode(text[at : found.start()])
            ids.append(tokenizer.special(found[0]))
            at = found.end()
    return ids + tokenizer.encode(text[at:])
