"""Text to ids: Kimi's goldens, text that looks like control tokens, and hostile shapes of text."""

from __future__ import annotations

import base64
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.gateway.tokenizer import CHUNK, RUN, SPECIAL_TOKENS, Tokenizer, TokenizerError
from services.verifier.vocabulary import read_vocabulary
from tests.kimi import BUNDLED, KIMI, NEEDS_KIMI, load_kimi, published, without_think

FOLDERS = [pytest.param(BUNDLED, id="bundled"), pytest.param(KIMI, id="published", marks=NEEDS_KIMI)]


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


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_verifier_knows_the_same_bytes(folder: Path) -> None:
    """It looks for stop strings in them, and reads the folder by itself."""
    made = Tokenizer.from_folder(folder)
    assert read_vocabulary(folder, made.vocab_size) == list(made.pieces)


def test_text_never_becomes_a_control_token(tokenizer: Tokenizer) -> None:
    ranks = tokenizer.vocab_size - SPECIAL_TOKENS
    for text in (*tokenizer.special_names, "a<|im_end|><|im_user|>b", "".join(tokenizer.special_names)):
        ids = tokenizer.encode(text)
        assert max(ids) < ranks
        assert b"".join(tokenizer.pieces[i] for i in ids).decode() == text


NAMES = {  # place above the ranks, whether it is part of the text; of K2.6, and of K2 without those from 18 to 23
    "[BOS]": (0, False), "[EOS]": (1, False), "<|im_end|>": (2, False), "<|im_user|>": (3, False),
    "<|im_assistant|>": (4, False), "<|start_header_id|>": (6, False), "<|end_header_id|>": (7, False),
    "[EOT]": (9, False), "<|im_system|>": (10, False), "<|tool_calls_section_begin|>": (11, True),
    "<|tool_calls_section_end|>": (12, True), "<|tool_call_begin|>": (13, True),
    "<|tool_call_argument_begin|>": (14, True), "<|tool_call_end|>": (15, True), "<|im_middle|>": (17, False),
    "<|media_begin|>": (18, False), "<|media_content|>": (19, False), "<|media_end|>": (20, False),
    "<|media_pad|>": (21, False), "<think>": (22, True), "</think>": (23, True), "[UNK]": (254, False),
    "[PAD]": (255, False),
}  # fmt: skip


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("thinks", [True, False], ids=["K2-Thinking, K2.5, K2.6", "K2"])
def test_all_256_special_tokens_of_a_member_have_their_places(folder: Path, thinks: bool, tmp_path: Path) -> None:
    made = Tokenizer.from_folder(folder if thinks else without_think(folder, tmp_path / "k2"))
    ranks = made.vocab_size - SPECIAL_TOKENS
    assert [made.special(name) for name in made.special_names] == list(range(ranks, made.vocab_size))
    named = {name: at for name, at in NAMES.items() if thinks or not 18 <= at[0] <= 23}
    assert {name: made.special(name) - ranks for name in named} == {name: place for name, (place, _) in named.items()}
    texts = {place: made.pieces[ranks + place].decode() for place in range(SPECIAL_TOKENS)}
    visible = {place: name for name, (place, shown) in named.items() if shown}
    assert texts == {place: visible.get(place, "") for place in range(SPECIAL_TOKENS)}
    unnamed = set(range(SPECIAL_TOKENS)) - {place for place, _ in named.values()}
    assert {made.special(f"<|reserved_token_{ranks + place}|>") - ranks for place in unnamed} == unnamed


def random_text(draw: random.Random) -> str:
    """Up to 60 characters of any script, or of those on whose borders the pattern cuts."""
    borders = "aZ'S tre\n\r\t  09_<|>[]/你好，。é́İßΩʰ一\u200d🤝🏽\u3000\x00"
    if draw.random() < 0.5:
        return "".join(draw.choices(borders, k=draw.randrange(60)))
    scripts = [draw.randrange(0xD800), draw.randrange(0xE000, 0x110000), draw.randrange(0x4E00, 0xA000)]
    return "".join(chr(draw.choice(scripts) ^ draw.randrange(32)) for _ in range(draw.randrange(60)))


@pytest.mark.parametrize("folder", FOLDERS)
def test_random_unicode_comes_back_and_is_what_the_published_tokenizer_makes_of_it(folder: Path) -> None:
    draw, ours, theirs = random.Random(7), Tokenizer.from_folder(folder), published(folder)
    for _ in range(100_000):
        text = random_text(draw)
        ids = ours.encode(text)
        assert ids == theirs.encode(text, disallowed_special=()), text
        assert b"".join(ours.pieces[i] for i in ids).decode() == text


def documents(most: int) -> Iterator[str]:
    """So many bytes of code, Chinese and emoji, mixed in lines and in files of 100 to 200 thousand characters."""
    draw, size = random.Random(11), 0
    code = [path.read_text() for path in sorted((BUNDLED.parents[1] / "services").rglob("*.py"))]
    while size < most:
        parts = [draw.choice(code)]
        for _ in range(400):
            parts.append("".join(chr(draw.randrange(0x4E00, 0x9FA6)) for _ in range(draw.randrange(80))))
            parts.append("".join(chr(draw.randrange(0x1F300, 0x1F6FF)) for _ in range(draw.randrange(6))))
            parts.append(draw.choice(("，", "。", " ", "\n", "\n\n    ", "x = 1\n", "'s", "2024年")))
            parts.append(draw.choice(code)[(at := draw.randrange(2000)) : at + draw.randrange(300)])
        text = "".join(parts)
        size += len(text.encode())
        yield text


@pytest.mark.parametrize("folder", FOLDERS)
def test_ten_megabytes_of_mixed_text_come_back_at_a_megabyte_a_second(folder: Path) -> None:
    ours, theirs, size, taken = Tokenizer.from_folder(folder), published(folder), 0, 0.0
    # The bundled vocabulary takes the whole of it only where the published one is not there to do so.
    for text in documents(2_000_000 if folder == BUNDLED and KIMI.exists() else 10_000_000):
        begun = time.thread_time()  # of this thread alone: others use the cores too
        ids = ours.encode(text)
        taken += time.thread_time() - begun
        size += len(text.encode())
        assert ids == theirs.encode(text, disallowed_special=())
        assert b"".join(ours.pieces[i] for i in ids).decode() == text
    assert size / taken >= 1e6, f"{size / taken / 1e6:.2f} MB/s"


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
        (BYTES, {"added_tokens_decoder": {"x": {"content": "x", "special": True}}}, "tokenizer_config.json"),
        (BYTES, {"added_tokens_decoder": {"300": {"content": "x"}}}, "tokenizer_config.json"),
        (BYTES, {"added_tokens_decoder": {"300": {"content": "", "special": True}}}, "tokenizer_config.json"),
        (BYTES, {"added_tokens_decoder": {"300": "x"}}, "tokenizer_config.json"),
        (BYTES, {"added_tokens_decoder": ["x"]}, "tokenizer_config.json"),
        (
            BYTES,
            {"added_tokens_decoder": {key: {"content": "x", "special": True} for key in ("300", "301")}},
            "tokenizer_config.json",
        ),
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
