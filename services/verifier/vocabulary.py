"""The bytes of each token, for stop strings. No tokenizer: nothing is encoded here."""

from __future__ import annotations

import base64
from pathlib import Path

from hedgerow import strict_json
from hedgerow.errors import InvalidRequest
from hedgerow.small_files import read_small


def read_vocabulary(folder: Path, size: int) -> list[bytes]:
    """What each of `size` tokens adds to the text: b"" for control tokens, and for those without a name.

    Reads `tiktoken.model` (a line: base64, rank) and `tokenizer_config.json`, where an added token whose `special` is
    false (`<think>`, the tool-call markers) is part of the text under its name. Raises InvalidRequest with the file.
    """
    pieces = [b""] * size
    ranks = folder / "tiktoken.model"
    named = folder / "tokenizer_config.json"
    try:
        for line in read_small(ranks).splitlines():
            piece, rank = line.split()
            pieces[int(rank)] = base64.b64decode(piece, validate=True)
    except (OSError, ValueError, IndexError) as error:
        raise InvalidRequest(str(ranks), _why(error), f"lines of base64 and a rank below {size}") from error
    try:
        added = strict_json.loads(read_small(named)).get("added_tokens_decoder", {})
        for number, entry in added.items():
            pieces[int(number)] = b"" if entry["special"] else str(entry["content"]).encode()
    except (OSError, ValueError, IndexError, KeyError, AttributeError) as error:
        raise InvalidRequest(str(named), _why(error), f"added tokens with ids below {size}") from error
    return pieces


def _why(error: Exception) -> str:
    """Without the path, which is named already."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
