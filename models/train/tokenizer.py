"""Train the byte-level BPE and write it in Kimi's form: `tiktoken.model` + `tokenizer_config.json`.

    python -m models.train.tokenizer         # reads .work/train/*.jsonl, writes models/sapling

The vocabulary is 3,840 ranks plus Kimi's 256 special tokens at Kimi's offsets from the last rank, so
that every code path that depends on special tokens is the one that the large model takes.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
from collections.abc import Iterator
from pathlib import Path

import tiktoken
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from models.train.tokenizer_ids import RANKS

WORK = Path(".work/train")
SPECIAL_TOKENS = 256
HAN = "&&[^\\p{Han}]"
UPPER = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{HAN}]"
LOWER = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{HAN}]"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT = "|".join([
    r"[\p{Han}]+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTION}",
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTION}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
])  # fmt: skip
# offset from the last rank -> (token, "special" in the sense of skip_special_tokens)
NAMED: dict[int, tuple[str, bool]] = {
    0: ("[BOS]", True), 1: ("[EOS]", True), 2: ("<|im_end|>", True), 3: ("<|im_user|>", True),
    4: ("<|im_assistant|>", True), 6: ("<|start_header_id|>", True), 7: ("<|end_header_id|>", True),
    9: ("[EOT]", True), 10: ("<|im_system|>", True), 11: ("<|tool_calls_section_begin|>", False),
    12: ("<|tool_calls_section_end|>", False), 13: ("<|tool_call_begin|>", False),
    14: ("<|tool_call_argument_begin|>", False), 15: ("<|tool_call_end|>", False), 17: ("<|im_middle|>", True),
    18: ("<|media_begin|>", True), 19: ("<|media_content|>", True), 20: ("<|media_end|>", True),
    21: ("<|media_pad|>", True), 22: ("<think>", False), 23: ("</think>", False), 254: ("[UNK]", True),
    255: ("[PAD]", True),
}  # fmt: skip


def special_tokens() -> dict[str, int]:
    """Every special token by name; the unnamed ones are reserved, as in Kimi's tokenizer."""
    names = {k: f"<|reserved_token_{RANKS + k}|>" for k in range(SPECIAL_TOKENS)}
    names |= {k: name for k, (name, _) in NAMED.items()}
    return {name: RANKS + k for k, name in names.items()}


def untrained() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def texts(name: str, sample: float = 1.0) -> Iterator[str]:
    """The texts of one split: file contents, or request and answer of chat pairs."""
    draw = random.Random(0)
    with (WORK / f"{name}.jsonl").open() as lines:
        for line in lines:
            if draw.random() < sample:
                record = json.loads(line)
                yield record.get("text") or record["request"] + "\n" + record["answer"]


def train(sample: float) -> Tokenizer:
    tokenizer = untrained()
    trainer = trainers.BpeTrainer(
        vocab_size=RANKS, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator(texts("train", sample), trainer)
    return tokenizer


def byte_of_character() -> dict[str, int]:
    """The byte behind each character of the byte-level alphabet (the printable bytes stand for themselves)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def ranks_of(tokenizer: Tokenizer) -> dict[bytes, int]:
    """tiktoken's merge ranks; a token's id is its rank because the trainer numbers merges in order."""
    to_byte = byte_of_character()
    ranks = {bytes(to_byte[c] for c in token): rank for token, rank in tokenizer.get_vocab().items()}
    assert sorted(ranks.values()) == list(range(RANKS)), "ranks must be contiguous"
    assert all(bytes([b]) in ranks and ranks[bytes([b])] < 256 for b in range(256)), "the first ranks are the bytes"
    return ranks


def load(folder: Path) -> tiktoken.Encoding:
    """The written vocabulary as a tiktoken encoding."""
    lines = (folder / "tiktoken.model").read_text().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
    return tiktoken.Encoding("sapling", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens=special_tokens())


def config() -> dict[str, object]:
    """`tokenizer_config.json` with the keys of Kimi's, ids moved to this vocabulary."""
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    decoder = {str(RANKS + k): {"content": name, **plain, "special": special} for k, (name, special) in NAMED.items()}
    extra = [NAMED[k][0] for k in (2, 3, 4, 6, 7, 9, 10, 17, 18, 19, 20, 21)]
    return {
        "added_tokens_decoder": decoder, "additional_special_tokens": extra, "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": False, "eos_token": "[EOS]", "extra_special_tokens": {},
        "model_max_length": 1000000000000000019884624838656, "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer", "unk_token": "[UNK]",
    }  # fmt: skip


def verify(folder: Path, tokenizer: Tokenizer) -> float:
    """tiktoken must reproduce the trainer's encoding on held-out text; returns bytes per token."""
    encoding, tokens, size = load(folder), 0, 0
    for text in [*texts("heldout"), *texts("heldout_chat")]:
        ours = encoding.encode_ordinary(text)
        assert ours == tokenizer.encode(text).ids, "tiktoken and tokenizers disagree"
        assert encoding.decode(ours) == text
        tokens, size = tokens + len(ours), size + len(text.encode())
    return size / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("models/sapling"))
    parser.add_argument("--sample", type=float, default=0.3, help="share of the training files to learn merges from")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = train(args.sample)
    ranks = sorted(ranks_of(tokenizer).items(), key=lambda item: item[1])
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks]
    (args.out / "tiktoken.model").write_text("".join(lines))
    (args.out / "tokenizer_config.json").write_text(json.dumps(config(), indent=2) + "\n")
    tokenizer.save(str(WORK / "tokenizer.json"))
    print(f"held-out bytes per token: {verify(args.out, tokenizer):.3f}; tiktoken and tokenizers agree")


if __name__ == "__main__":
    main()
