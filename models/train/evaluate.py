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
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from models.train.data import read_stream, windows
from models.train.export import read_target
from models.train.generate import freeze
from models.train.target import Target

EDGES = [0, 64, 256, 512, 1024, 1536, 2048, 3072, 4096]
BANDS = [(0, 1024), (256, 1024), (512, 1024), (1024, 4096), (2048, 4096)]


class Losses(NamedTuple):
    """The loss of every position of some windows and the tokens that stood there, `[windows, length]` both."""

    nats: Tensor
    labels: Tensor

    def at(self, first: int, last: int) -> Losses:
        """The positions first .. last - 1."""
        return Losses(self.nats[:, first:last], self.labels[:, first:last])

    def bits_per_byte(self, sizes: Tensor) -> float:
        """`sizes`: bytes by token id."""
        return float(self.nats.double().sum() / sizes[self.labels].double().sum() / math.log(2))


def token_bytes(path: Path, vocab: int, device: str) -> Tensor:
    """Bytes per token id; special tokens count as none."""
    sizes = torch.zeros(vocab)
    for line in path.read_text().splitlines():
        token, rank = line.split()
        sizes[int(rank)] = len(base64.b64decode(token))
    return sizes.to(device)


@torch.inference_mode()
def nats(model: Target, stream: Tensor, length: int, rows: int, limit: int | None = None) -> Losses:
    """Losses of consecutive windows, `rows` of them at a time; with a `limit`, of that many spread over the stream."""
    count = (len(stream) - 1) // length
    picked = torch.arange(count) if limit is None else torch.linspace(0, count - 1, min(limit, count)).long()
    losses, labels = [], []
    for part in torch.split(picked.to(stream.device) * length, rows):
        batch = windows(stream, part, length + 1)
        hidden, _, _ = model.hidden(batch[:, :-1])
        logits = model.logits(hidden).float()
        wanted = batch[:, 1:]
        # flat: over a transposed view a CPU takes six times as long
        losses.append(F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none").view(wanted.shape))
        labels.append(wanted)
    return Losses(torch.cat(losses), torch.cat(labels))


def by_length(losses: Losses, sizes: Tensor) -> dict[str, object]:
    """Figures of windows of the trained length. What stands at 0-1,024 is a window of 1,024 of its own."""
    out: dict[str, object] = {
        "bits_per_byte_4096": round(losses.bits_per_byte(sizes), 4),
        "nats_by_position": {f"{a}-{b}": round(float(losses.nats[:, a:b].mean()), 4) for a, b in pairwise(EDGES)},
    }
    for a, b in BANDS:
        out[f"bits_per_byte_{a}_{b}"] = round(losses.at(a, b).bits_per_byte(sizes), 4)
    return out


def report(model: Target, corpus: Path, device: str, full: bool, vocabulary: Path | None = None) -> dict[str, object]:
    """Figures at windows of 1,024; with `full` also at the trained length, by position, and on chat pairs."""
    freeze(model)
    sizes = token_bytes(vocabulary or Path("models/sapling/tiktoken.model"), model.s.vocab, device)
    stream = read_stream(corpus, "heldout", device)
    short = nats(model, stream, 1024, 32)
    out: dict[str, object] = {
        "bits_per_byte_1024": round(short.bits_per_byte(sizes), 4), "nats_1024": round(float(short.nats.mean()), 4),
        "tokens": short.nats.numel(),
    }  # fmt: skip
    if full:
        out |= by_length(nats(model, stream, 4096, 8), sizes)
        chat = nats(model, read_stream(corpus, "heldout_chat", device), 1024, 32)
        out["chat_nats"] = round(float(chat.nats.mean()), 4)
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
