"""Kimi's tokenizer: byte-level BPE over `tiktoken.model`, and 256 special tokens above its ranks.

Text is always encoded as text: a special token's name inside it becomes ordinary tokens. Special tokens enter a prompt
as ids only, from the chat template or from a caller who sends ids.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import tiktoken

from hedgerow import strict_json
from hedgerow.errors import HedgerowError
from hedgerow.small_files import read_small

SPECIAL_TOKENS = 256
# Words are cut as o200k cuts them, but runs of Han characters stand alone; classes intersect (fancy-regex's `&&`).
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT = "|".join(
    (
        r"[\p{Han}]+",
        f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
# The published tokenizer cuts long text at these lengths before it splits; equal ids need equal cuts. The second one
# also bounds the regular expression's backtracking and the merge of a single piece.
CHUNK, RUN = 400_000, 25_000
_LONG_RUN = re.compile(rf"\s{{{RUN + 1},}}|\S{{{RUN + 1},}}")


class TokenizerError(HedgerowError):
    """The file `path` of a model folder cannot be used because of `why`."""

    reason: ClassVar[str] = "INVALID_CONFIG"

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path}: {why}", metadata={"path": path, "why": why})


class Tokenizer:
    """Text to ids, and the bytes of each id.

    `special_names` are all 256, by their ids; one without a name of its own is `<|reserved_token_{id}|>`. `pieces[id]`
    are the bytes that a reader sees: empty for control tokens, the name of a token that is part of the text although it
    is atomic (`<think>`, the tool-call markers).
    """

    def __init__(self, ranks: Mapping[bytes, int], special: Mapping[str, int], hidden: frozenset[int]) -> None:
        self._encoding = tiktoken.Encoding(
            "kimi", pat_str=SPLIT, mergeable_ranks=dict(ranks), special_tokens={}, explicit_n_vocab=len(ranks)
        )
        self._special = dict(special)
        self.special_names = tuple(special)
        self.vocab_size = len(ranks) + SPECIAL_TOKENS
        pieces = [b""] * self.vocab_size
        for piece, rank in ranks.items():
            pieces[rank] = piece
        for name, token in special.items():
            pieces[token] = b"" if token in hidden else name.encode()
        self.pieces: Sequence[bytes] = pieces
        self.longest_piece = max(map(len, ranks))

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read `tiktoken.model` and `tokenizer_config.json`. Raises TokenizerError with the file and what is wrong."""
        ranks = _read_ranks(folder / "tiktoken.model")
        named, visible = _read_added(folder / "tokenizer_config.json", len(ranks))
        tokens = range(len(ranks), len(ranks) + SPECIAL_TOKENS)
        special = {named.get(token, f"<|reserved_token_{token}|>"): token for token in tokens}
        if len(special) < SPECIAL_TOKENS:
            raise TokenizerError(folder / "tokenizer_config.json", "two added tokens have one name")
        return cls(ranks, special, frozenset(tokens) - visible)

    def encode(self, text: str) -> list[int]:
        """The ids of `text`. Never a special token. Releases the GIL for most of its time."""
        if len(text) <= RUN:
            return self._encoding.encode_ordinary(text)
        return [token for part in _cut(text) for token in self._encoding.encode_ordinary(part)]

    def special(self, name: str) -> int:
        """The id of the special token `name`. Raises KeyError."""
        return self._special[name]


def _cut(text: str) -> Iterator[str]:
    for start in range(0, len(text), CHUNK):
        chunk, at = text[start : start + CHUNK], 0
        for run in _LONG_RUN.finditer(chunk):
            for border in range(run.start() + RUN, run.end(), RUN):
                yield chunk[at:border]
                at = border
        yield chunk[at:]


def _read_ranks(path: Path) -> dict[bytes, int]:
    try:
        lines = read_small(path).splitlines()
        ranks = {base64.b64decode(piece, validate=True): int(rank) for piece, rank in (line.split() for line in lines)}
    except OSError as error:
        raise TokenizerError(path, error.strerror or str(error)) from error
    except (ValueError, binascii.Error) as error:
        raise TokenizerError(path, f"not lines of base64 and rank: {error}") from error
    if sorted(ranks.values()) != list(range(len(lines))):
        raise TokenizerError(path, "ranks are not contiguous from 0, or a piece occurs twice")
    if not all(bytes([byte]) in ranks for byte in range(256)):
        raise TokenizerError(path, "not every single byte has a rank")
    return ranks


def _read_added(path: Path, ranks: int) -> tuple[dict[int, str], frozenset[int]]:
    """The names of the special tokens that have one, and which of them are part of the text."""
    named: dict[int, str] = {}
    visible = set[int]()
    added = read_json(path).get("added_tokens_decoder", {})
    if not isinstance(added, dict):
        raise TokenizerError(path, "added_tokens_decoder is no object")
    for number, entry in added.items():
        token = int(number) if number.isdecimal() else -1
        if not ranks <= token < ranks + SPECIAL_TOKENS:
            raise TokenizerError(path, f"added token {number} is not among the {SPECIAL_TOKENS} above the ranks")
        name, special = (entry.get(key) if isinstance(entry, dict) else None for key in ("content", "special"))
        if not isinstance(name, str) or not name or not isinstance(special, bool):
            raise TokenizerError(path, f"added token {number} needs a text `content` and true or false as `special`")
        named[token] = name
        if not special:
            visible.add(token)
    return named, frozenset(visible)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a model folder. Raises TokenizerError."""
    try:
        value = strict_json.loads(read_small(path))
    except OSError as error:
        raise TokenizerError(path, error.strerror or str(error)) from error
    except ValueError as error:
        raise TokenizerError(path, f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(path, "not a JSON object")
    return value
