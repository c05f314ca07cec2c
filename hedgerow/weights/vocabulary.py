"""Tokenizer files: another folder's, or made-up ones of the right size and with Kimi's names of special tokens."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
from pathlib import Path

from hedgerow.errors import InvalidRequest

SPECIALS = 256
# What a folder holds besides weights and code: copied as it is. Code (*.py) never is.
FILES = (
    "tiktoken.model", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "generation_config.json", "preprocessor_config.json", "LICENSE",
)  # fmt: skip
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


def copy_files(source: Path, folder: Path, vocab: int | None = None) -> None:
    """The tokenizer's and other small files of a folder. Raises InvalidRequest for another vocabulary than `vocab`."""
    model = source / "tiktoken.model"
    if vocab is not None:
        if not model.is_file():
            raise InvalidRequest("--tokenizer", str(source), "a folder with tiktoken.model")
        found = sum(1 for line in model.read_bytes().splitlines() if line.strip()) + SPECIALS
        if found != vocab:
            raise InvalidRequest("--tokenizer", found, f"the vocabulary of {vocab}; see --vocab")
    for name in FILES:
        if (source / name).is_file() and not (folder / name).exists():
            shutil.copyfile(source / name, folder / name)
