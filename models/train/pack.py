"""Encode the splits into token streams, compressed for the trip to the training machine.

    python -m models.train.pack              # .work/train/*.jsonl -> .carry/corpus/*.u16.xz

A document is a file and [EOS], or four chat pairs and [EOS]; documents are shuffled. Little-endian uint16.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from models.train import tokenizer_ids as tok

WORK = Path(".work/train")
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 27, "lc": 2, "lp": 1, "pb": 1}]
CHAT_PER_DOCUMENT = 4
Ids = npt.NDArray[np.uint16]


def records(name: str) -> list[dict[str, str]]:
    with (WORK / f"{name}.jsonl").open() as lines:
        return [json.loads(line) for line in lines]


def encode_all(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """Encode in slices: a batch keeps every offset of every token, which is many times the text."""
    out: list[list[int]] = []
    for i in range(0, len(texts), 500):
        out += [e.ids for e in tokenizer.encode_batch_fast(texts[i : i + 500])]
    return out


def chat_ids(tokenizer: Tokenizer, name: str) -> list[list[int]]:
    """Kimi's turn form with thinking off: user turn, assistant turn, `<think></think>`, answer."""
    user, assistant = (tokenizer.encode(n).ids for n in ("user", "assistant"))
    pairs = records(name)
    requests = encode_all(tokenizer, [p["request"] for p in pairs])
    answers = encode_all(tokenizer, [p["answer"] for p in pairs])
    opening = [tok.IM_USER, *user, tok.IM_MIDDLE]
    middle = [tok.IM_END, tok.IM_ASSISTANT, *assistant, tok.IM_MIDDLE, tok.THINK, tok.END_THINK]
    return [[*opening, *r, *middle, *a, tok.IM_END] for r, a in zip(requests, answers, strict=True)]


def stream(documents: list[list[int]]) -> Ids:
    random.Random(0).shuffle(documents)
    return np.concatenate([np.array([*d, tok.EOS], dtype=np.uint16) for d in documents])


def grouped(pairs: list[list[int]]) -> list[list[int]]:
    random.Random(1).shuffle(pairs)
    groups = [pairs[i : i + CHAT_PER_DOCUMENT] for i in range(0, len(pairs), CHAT_PER_DOCUMENT)]
    return [[t for pair in group for t in pair] for group in groups]


def save(path: Path, ids: Ids) -> None:
    path.write_bytes(lzma.compress(ids.tobytes(), format=lzma.FORMAT_XZ, filters=FILTERS))
    print(f"{path.name}: {len(ids)} tokens, {path.stat().st_size / 2**20:.2f} MiB", flush=True)


def load(path: Path) -> Ids:
    return np.frombuffer(lzma.decompress(path.read_bytes()), dtype=np.uint16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(".carry/corpus"))
    parser.add_argument("--parts", type=int, default=2, help="pieces of the training stream, one thread each")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(WORK / "tokenizer.json"))
    streams: dict[str, Ids] = {}
    for name in ("heldout", "drafter", "train"):
        files = encode_all(tokenizer, [r["text"] for r in records(name)])
        chat = grouped(chat_ids(tokenizer, f"{name}_chat"))
        print(f"{name}: {sum(map(len, files))} tokens of source, {sum(map(len, chat))} of chat", flush=True)
        if name == "train":
            for i, part in enumerate(np.array_split(stream(files + chat), args.parts)):
                streams[f"train{i}"] = part
        else:
            streams |= {name: stream(files), f"{name}_chat": stream(chat)}
    with ThreadPoolExecutor(args.parts) as pool:
        list(pool.map(lambda item: save(args.out / f"{item[0]}.u16.xz", item[1]), streams.items()))


if __name__ == "__main__":
    main()
