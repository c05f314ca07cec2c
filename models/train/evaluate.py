"""Held-out nats per token and bits per byte, in the precision that serves (fp32), also by position.

python -m models.train.evaluate --target models/sapling
"""

from __future__ import annotations

import argparse
import base64
import json
import math
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from models.train.data import read_stream, windows
from models.train.export import read_target
from models.train.generate import freeze
from models.train.target import Target

EDGES = [0, 64, 256, 512, 1024, 1536, 2048, 3072, 4096]


def token_bytes(path: Path, vocab: int, device: str) -> Tensor:
    """Bytes per token id; special tokens count as none."""
    sizes = torch.zeros(vocab)
    for line in path.read_text().splitlines():
        token, rank = line.split()
        sizes[int(rank)] = len(base64.b64decode(token))
    return sizes.to(device)


@torch.inference_mode()
def nats(model: Target, stream: Tensor, length: int, rows: int) -> tuple[Tensor, Tensor]:
    """Loss of every position of consecutive windows `[windows, length]`, and the labels."""
    count = (len(stream) - 1) // length
    starts = torch.arange(count, device=stream.device) * length
    losses, labels = [], []
    for part in torch.split(starts, rows):
        batch = windows(stream, part, length + 1)
        hidden, _, _ = model.hidden(batch[:, :-1])
        logits = model.logits(hidden).float()
        losses.append(F.cross_entropy(logits.mT, batch[:, 1:], reduction="none"))
        labels.append(batch[:, 1:])
    return torch.cat(losses), torch.cat(labels)


def bits_per_byte(loss: Tensor, labels: Tensor, sizes: Tensor) -> float:
    return float(loss.double().sum() / sizes[labels].double().sum() / math.log(2))


def report(model: Target, corpus: Path, device: str, full: bool, vocabulary: Path | None = None) -> dict[str, object]:
    """Figures at windows of 1,024; with `full` also at the trained length, by position, and on chat pairs."""
    freeze(model)
    sizes = token_bytes(vocabulary or Path("models/sapling/tiktoken.model"), model.s.vocab, device)
    stream = read_stream(corpus, "heldout", device)
    loss, labels = nats(model, stream, 1024, 32)
    out: dict[str, object] = {
        "bits_per_byte_1024": round(bits_per_byte(loss, labels, sizes), 4), "nats_1024": round(float(loss.mean()), 4),
        "tokens": loss.numel(),
    }  # fmt: skip
    if full:
        loss, labels = nats(model, stream, 4096, 8)
        out["bits_per_byte_4096"] = round(bits_per_byte(loss, labels, sizes), 4)
        out["nats_by_position"] = {f"{a}-{b}": round(float(loss[:, a:b].mean()), 4) for a, b in pairwise(EDGES)}
        out["bits_per_byte_256_1024"] = round(bits_per_byte(loss[:, 256:1024], labels[:, 256:1024], sizes), 4)
        out["bits_per_byte_1024_4096"] = round(bits_per_byte(loss[:, 1024:], labels[:, 1024:], sizes), 4)
        loss, labels = nats(model, read_stream(corpus, "heldout_chat", device), 1024, 32)
        out["chat_nats"] = round(float(loss.mean()), 4)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=Path("models/sapling"))
    parser.add_argument("--corpus", type=Path, default=Path(".carry/corpus"))
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    model = read_target(args.target, torch.float32).to(args.device)
    print(json.dumps(report(model, args.corpus, args.device, full=True), indent=1))


if __name__ == "__main__":
    main()
