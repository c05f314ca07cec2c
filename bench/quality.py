"""Bits per byte of held-out text with the served INT4 weights, early and late in the context.

    python -m bench.quality                                 the held-out files that this machine has installed
    python -m bench.quality --wheels .work/train/wheels     those inside fetched wheels as well
    python -m bench.quality --corpus .carry/corpus          all of them, as models.train.pack wrote them

Windows of 4,096 tokens, side by side in PyTorch; the first of them also goes through the engine that serves, and its
losses must agree. Positions 0-1,023 are what windows of 1,024 would give: nothing stands before them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.arguments import whole_from
from bench.subjects import machine
from hedgerow.model.batch import SequenceRows
from hedgerow.model.interface import Target
from hedgerow.model.select import load_target
from models.train import tokenizer_ids as tok
from models.train.data import read_stream
from models.train.evaluate import Losses, by_length, nats, token_bytes
from models.train.export import read_target
from models.train.generate import freeze
from models.train.installed import folders_of_this_python, heldout_texts, read_list
from services.gateway.tokenizer import Tokenizer

WINDOW, CHUNK = 4096, 256
MOST_BITS = 0.72  # a byte, windows of 1,024
MOST_LATE = 1.02  # positions 2,048-4,095 over 512-1,023
CLOSE = 1e-4  # nats, mean over tokens: where two experts tie, one token may differ by more


def installed_stream(target: Path, wheels: Path | None) -> Tensor:
    """The held-out files found here, one after the other, each with its end-of-document token."""
    listed = read_list()
    texts = heldout_texts(listed, folders_of_this_python(), wheels)
    size = sum(len(text.encode()) for text in texts)
    print(f"{len(texts)} of {len(listed)} held-out files are on this machine, {size / 1e6:.2f} MB", flush=True)
    tokenizer = Tokenizer.from_folder(target)
    return torch.tensor([token for text in texts for token in (*tokenizer.encode(text), tok.EOS)], dtype=torch.int16)


@torch.inference_mode()
def served_nats(model: Target, window: Sequence[int]) -> Tensor:
    """Loss of every token of a window after its first, prefilled as the engine prefills: in chunks, into pages."""
    cache, losses = model.new_cache(-(-len(window) // 64)), []
    for first in range(0, len(window) - 1, CHUNK):
        chunk, labels = window[first : first + CHUNK], window[first + 1 : first + CHUNK + 1]
        pages = range(-(-(first + len(chunk)) // cache.page_size))
        rows = SequenceRows(first, pages, chunk, range(-1, len(chunk) - 1), range(len(labels)))
        losses.append(F.cross_entropy(model.forward([rows], cache).logits, torch.tensor(labels), reduction="none"))
    return torch.cat(losses)


def check_served(target: Path, stream: Tensor, losses: Losses) -> float:
    """How far the losses of PyTorch and of the engine that serves are apart over the first window, mean over tokens."""
    engine = load_target(target, feature_layers=())
    served = served_nats(engine, stream[: losses.nats.shape[1] + 1].long().tolist())
    return float((served - losses.nats[0].cpu()).abs().mean())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--target", type=Path, default=Path("models/sapling"))
    parser.add_argument("--corpus", type=Path, help="the folder that models.train.pack wrote")
    parser.add_argument("--wheels", type=Path, help="the folder that models.train.corpus fetched")
    parser.add_argument("--windows", type=whole_from(0), default=64, help="how many, spread over the text; 0: all")
    parser.add_argument("--threads", type=whole_from(1), default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path("bench/results/quality.json"))
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    stream = read_stream(args.corpus, "heldout", "cpu") if args.corpus else installed_stream(args.target, args.wheels)
    if len(stream) <= WINDOW:
        print(f"{len(stream)} tokens of held-out text, a window has {WINDOW}: try --wheels", file=sys.stderr)
        return 1
    model = freeze(read_target(args.target, torch.float32).to(args.device))
    rows = 1 if args.device == "cpu" else 8
    losses = nats(model, stream.to(args.device), WINDOW, rows, args.windows or None)
    return tell(args, losses, check_served(args.target, stream, losses))


def tell(args: argparse.Namespace, losses: Losses, difference: float) -> int:
    """Prints and writes the figures; 1 if one is out of bounds."""
    figures = by_length(losses, token_bytes(args.target / "tiktoken.model", 4096, args.device))
    first, middle, late = (float(str(figures[f"bits_per_byte_{k}"])) for k in ("0_1024", "512_1024", "2048_4096"))
    good = first <= MOST_BITS and late <= MOST_LATE * middle and difference <= CLOSE
    print(f"bits per byte, {losses.nats.numel()} tokens: windows of 1,024 {first:.4f} (at most {MOST_BITS}), "
          f"windows of 4,096 {figures['bits_per_byte_4096']}")  # fmt: skip
    print(f"positions 512-1,023 {middle:.4f}, 2,048-4,095 {late:.4f}: {late / middle - 1:+.1%} (at most +2 %)")
    print(f"the engine that serves differs by {difference:.1e} nats a token (at most {CLOSE:.0e})")
    source = "packed corpus" if args.corpus else "files on this machine"
    result = {
        "machine": machine() | ({} if args.device == "cpu" else {"device": torch.cuda.get_device_name()}),
        "text": {"source": source, "windows": len(losses.nats), "tokens": losses.nats.numel()},
        "late_over_early": round(late / middle, 4), "served_engine_differs_by_nats": difference, **figures,
    }  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
