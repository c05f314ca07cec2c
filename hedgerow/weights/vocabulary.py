"""Tokenizer files: another folder's, or made-up ones of the right size and with Kimi's names of special tokens."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from hedgerow.errors import InvalidRequest
from hedgerow.model.fields import ConfigError, Fields
from hedgerow.model.headers import CheckpointError, of_folder
from hedgerow.model.manifest import named
from hedgerow.small_files import read_small

SPECIALS = 256
# What a folder holds besides weights and code: copied as it is. Code (*.py) never is.
FILES = (
    "tiktoken.model", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "generation_config.json", "preprocessor_config.json", "LICENSE",
)  # fmt: skip
RANKS, ADDED = "tiktoken.model", "tokenizer_config.json"  # without these nothing is served
# offset from the first special id -> text
NAMED = {
    0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>", 6: "<|start_header_id|>",
    7: "<|end_header_id|>", 9: "[EOT]", 10: "<|im_system|>", 11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>", 13: "<|tool_call_begin|>", 14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>", 17: "<|im_middle|>", 18: "<|media_begin|>", 19: "<|media_content|>", 20: "<|media_end|>",
    21: "<|media_pad|>", 22: "<think>", 23: "</think>", 254: "[UNK]", 255: "[PAD]",
}  # fmt: skip
THOUGHTS_AND_IMAGES = range(18, 24)
NOT_SPECIAL = {11, 12, 13, 14, 15, 22, 23}  # atomic, yet kept by skip_special_tokens


def write_vocabulary(folder: Path, vocab: int, source: Path | None = None, thinks: bool = True) -> None:
    """tiktoken.model and tokenizer_config.json for `vocab` ids, the last 256 special. Raises InvalidRequest.

    `thinks`: with the tokens of thoughts and images, for which K2-Instruct has no names.
    """
    if source is not None:
        copy_files(source, folder, vocab)
        return
    ranks = vocab - SPECIALS
    if ranks < 256:
        raise InvalidRequest("vocabulary", vocab, "at least 512: 256 bytes and 256 special tokens")
    longer = (bytes(t) for n in (2, 3) for t in itertools.product(range(256), repeat=n))
    pieces = [bytes([i]) for i in range(256)] + list(itertools.islice(longer, ranks - 256))
    lines = (f"{base64.b64encode(piece).decode()} {rank}\n" for rank, piece in enumerate(pieces))
    (folder / "tiktoken.model").write_text("".join(lines))
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    added = {
        str(ranks + offset): {"content": text, **flags, "special": offset not in NOT_SPECIAL}
        for offset, text in NAMED.items()
        if thinks or offset not in THOUGHTS_AND_IMAGES
    }
    told = {
        "added_tokens_decoder": added, "bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]",
        "unk_token": "[UNK]", "clean_up_tokenization_spaces": False, "tokenizer_class": "TikTokenTokenizer",
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(told, indent=2) + "\n")


def copy_files(source: Path, folder: Path, vocab: int) -> None:
    """The tokenizer's and other small files of a folder. Raises InvalidRequest for another vocabulary than `vocab`."""
    model = source / RANKS
    if not model.is_file():
        raise InvalidRequest("--tokenizer", str(source), f"a folder with {RANKS}")
    found = sum(1 for line in model.read_bytes().splitlines() if line.strip()) + SPECIALS
    if found != vocab:
        raise InvalidRequest("--tokenizer", found, f"the vocabulary of {vocab}; see --vocab")
    for path in small_files(source):
        if not (folder / path.name).exists():
            copy(path, folder)


def small_files(source: Path) -> list[Path]:
    """Those of `FILES` that are there. Raises CheckpointError for one that is a link out of the folder: what it leads
    to is not the folder's, and would be copied."""
    return [path for name in FILES if (path := of_folder(source, name)).is_file()]


def copy(path: Path, folder: Path) -> None:
    """Aside and renamed: a copy that is there is a whole one. A full disk is said with the file."""
    aside = folder / f"{path.name}.new"
    with named(aside):
        shutil.copyfile(path, aside)
        aside.replace(folder / path.name)


def vocabulary_faults(folder: Path, vocab: int) -> Iterator[InvalidRequest]:
    """What keeps a gateway from tokenizing for a model of `vocab` tokens."""
    missing = [name for name in (RANKS, ADDED) if not (folder / name).is_file()]
    for name in missing:
        yield CheckpointError(folder / name, "", "the tokenizer's file", "missing")
    if RANKS not in missing:
        yield from _rank_faults(folder / RANKS, vocab - SPECIALS)
    if ADDED not in missing:
        try:
            yield from _added_faults(Fields.read(folder / ADDED), vocab)
        except ConfigError as fault:
            yield fault


def _rank_faults(path: Path, count: int) -> Iterator[CheckpointError]:
    try:
        lines = read_small(path).splitlines()
        ranks = {base64.b64decode(piece, validate=True): int(rank) for piece, rank in (line.split() for line in lines)}
    except OSError as error:
        yield CheckpointError(path, "", "a file that can be read", error.strerror)
        return
    except ValueError:
        yield CheckpointError(path, "", "lines of base64 and rank", "another line")
        return
    if len(lines) != count:
        yield CheckpointError(path, "", f"{count} ranks, {SPECIALS} below vocab_size", f"{len(lines)}")
    if sorted(ranks.values()) != list(range(len(lines))):
        yield CheckpointError(path, "", "ranks from 0 on, each piece once", "a gap, or one twice")
    if not all(bytes([byte]) in ranks for byte in range(256)):
        yield CheckpointError(path, "", "a rank for every single byte", "a byte without one")


def _added_faults(f: Fields, vocab: int) -> Iterator[ConfigError]:
    added, names = f.inner("added_tokens_decoder"), Counter[str]()
    if added is None:
        return
    for number in added.values:
        entry = added.inner(number)
        if not number.isdecimal() or len(number) > 9 or not vocab - SPECIALS <= int(number) < vocab or entry is None:
            yield added.fail(number, f"a token of the last {SPECIALS} of {vocab}")
            continue
        name, _ = entry.get("content", str), entry.get("special", bool)
        names[name] += 1
        if not name or names[name] > 1:
            yield entry.fail("content", "a name of its own")
