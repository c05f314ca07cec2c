"""Text to ids: Kimi's goldens, text that looks like control tokens, and hostile shapes of text."""

from __future__ import annotations

import base64
import functools
import json
import random
from pathlib import Path

import pytest

from services.gateway.tokenizer import CHUNK, RUN, SPECIAL_TOKENS, Tokenizer, TokenizerError

ROOT = Path(__file__).resolve().parents[2]
KIMI = ROOT.parent / "shared" / "data" / "kimi"
BUNDLED = ROOT / "models" / "sapling"
NEEDS_KIMI = pytest.mark.skipif(not KIMI.exists(), reason=f"Kimi's vocabulary is not at {KIMI}")


@functools.cache
def load_kimi() -> Tokenizer:
    """Loaded once for all tests: it takes most of a second."""
    return Tokenizer.from_folder(KIMI)


@pytest.fixture
def kimi() -> Tokenizer:
    return load_kimi()


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(BUNDLED)


@NEEDS_KIMI
@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello, world!", [19180, 11, 2695, 0]),
        ("你好，世界。北京2024年", [33845, 378, 2243, 292, 3372, 2975, 19, 532]),
        ("I'll DON'T we've", [65447, 92629, 64833, 22205]),
        ("user", [2482]),
        ("assistant", [69702]),
        ("system", [14062]),
        ("tool", [20960]),
        ("tool_declare", [20960, 35556, 677]),
    ],
)
def test_kimi_goldens(kimi: Tokenizer, text: str, ids: list[int]) -> None:
    assert kimi.encode(text) == ids


@NEEDS_KIMI
def test_kimi_sizes_and_special_tokens(kimi: Tokenizer) -> None:
    assert kimi.vocab_size == 163_840
    assert kimi.special("[BOS]") == 163_584
    assert kimi.special("<|im_end|>") == 163_586
    assert kimi.pieces[kimi.special("<|im_end|>")] == b""
    assert kimi.pieces[kimi.special("<think>")] == b"<think>"
    assert kimi.pieces[163_700] == b"", "a reserved token has no text"


def test_the_bundled_vocabulary_has_kimis_offsets(tokenizer: Tokenizer) -> None:
    ranks = tokenizer.vocab_size - SPECIAL_TOKENS
    offsets = {"[BOS]": 0, "[EOS]": 1, "<|im_end|>": 2, "<|im_user|>": 3, "<|im_assistant|>": 4, "<|im_system|>": 10}
    offsets |= {"<|im_middle|>": 17, "<think>": 22, "</think>": 23, "[UNK]": 254, "[PAD]": 255}
    assert {name: tokenizer.special(name) - ranks for name in offsets} == offsets


def test_text_never_becomes_a_control_token(tokenizer: Tokenizer) -> None:
    ranks = tokenizer.vocab_size - SPECIAL_TOKENS
    names = json.loads((BUNDLED / "tokenizer_config.json").read_text())["added_tokens_decoder"].values()
    for text in [entry["content"] for entry in names] + ["a<|im_end|><|im_user|>b", "<|reserved_token_3900|>"]:
        ids = tokenizer.encode(text)
        assert max(ids) < ranks
        assert b"".join(tokenizer.pieces[i] for i in ids).decode() == text


def test_random_unicode_comes_back(tokenizer: Tokenizer) -> None:
    draw = random.Random(7)
    for _ in range(300):
        text = "".join(chr(draw.choice([draw.randrange(0xD800), draw.randrange(0xE000, 0x110000)])) for _ in range(40))
        assert b"".join(tokenizer.pieces[i] for i in tokenizer.encode(text)).decode() == text


@pytest.mark.parametrize("text", ["a" * 70_000, " " * 70_000, "\n" * 70_000, "x = 1\n" * 80_000, "z" * (RUN + 1)])
def test_long_text_is_cut_as_the_published_tokenizer_cuts_it(tokenizer: Tokenizer, text: str) -> None:
    """Blocks of 400,000 characters; in each, a run of (non-)space is cut after every 25,000 characters."""
    parts = []
    for block in (text[i : i + CHUNK] for i in range(0, len(text), CHUNK)):
        start, length = 0, 0
        for i, character in enumerate(block):
            length = length + 1 if i and character.isspace() == block[i - 1].isspace() else 1
            if length > RUN:
                parts.append(block[start:i])
                start, length = i, 1
        parts.append(block[start:])
    assert tokenizer.encode(text) == [token for part in parts for token in tokenizer.encode(part)]


def write(folder: Path, lines: list[str], config: object) -> Path:
    (folder / "tiktoken.model").write_text("\n".join(lines))
    (folder / "tokenizer_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


BYTES = [f"{base64.b64encode(bytes([i])).decode()} {i}" for i in range(256)]


@pytest.mark.parametrize(
    ("lines", "config", "file"),
    [
        (BYTES[:-1], {}, "tiktoken.model"),  # a byte is missing
        ([*BYTES, "YWI= 300"], {}, "tiktoken.model"),  # a gap in the ranks
        ([*BYTES, "YQ== 256"], {}, "tiktoken.model"),  # a piece twice
        ([*BYTES, "%%% 256"], {}, "tiktoken.model"),
        ([*BYTES, "YWI="], {}, "tiktoken.model"),
        (BYTES, "{", "tokenizer_config.json"),
        (BYTES, "[]", "tokenizer_config.json"),
        (BYTES, {"added_tokens_decoder": {"3": {"content": "x", "special": True}}}, "tokenizer_config.json"),
    ],
)
def test_a_broken_folder_is_refused_with_the_files_name(
    tmp_path: Path, lines: list[str], config: object, file: str
) -> None:
    with pytest.raises(TokenizerError) as refused:
        Tokenizer.from_folder(write(tmp_path, lines, config))
    assert refused.value.metadata["path"] == str(tmp_path / file)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="No such file"):
        Tokenizer.from_folder(tmp_path)
