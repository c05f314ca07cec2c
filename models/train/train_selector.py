"""Make a candidate selector for a drafter, which stays as it is.

    python -m models.train.train_selector --ranks 64 --passes 0 --seconds 60 --out OUT    # teach_selector: with a GPU

It begins with which token follows which in the corpus: counted, and factored to its rank. With `--passes` the target
goes on to teach it: at every position of a block the selector must say how likely each candidate is after the token
before it, and one pass of the target over a window of text says the same after the text's own tokens, so that none has
to be written. Writes OUT/RANK/selector, a folder that belongs beside the drafter's weights, for each of `--ranks`, and
what each does on windows that it was not trained on.
"""

from __future__ import annotations

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from models.train.data import random_windows, read_stream
from models.train.drafter import Drafter
from models.train.export import bf16, read_drafter, read_target, save, write_json
from models.train.generate import freeze
from models.train.selector import Places, Selector, SelectorShape, divergence
from models.train.target import Target

LEFT_OUT = 16  # one batch of windows in so many is not trained on


@dataclass(frozen=True)
class Plan:
    """Windows of text, anchors in each, and how the selector is fitted to what they give."""

    windows: int = 2
    length: int = 320
    first: int = 32  # anchor, at the least
    anchors: int = 256
    batch: int = 4096
    rate: float = 4e-3
    decay: float = 0.02


TINY_PLAN = Plan(windows=1, length=64, first=8, anchors=8, batch=64)


@torch.inference_mode()
def places(target: Target, drafter: Drafter, ids: Tensor, anchors: Tensor, top_k: int) -> Places:
    """Of the blocks at `anchors` `[B, n]` in windows `[B, T]`."""
    s, batch = drafter.s, len(anchors)
    final, kept, _ = target.hidden(ids, s.target_layer_ids)
    taught = target.logits(final).float().softmax(-1)  # [B, T, V], of the position behind each
    hidden = drafter(torch.cat(kept, -1).to(target.dtype), ids, anchors, target.embed)
    logits = (hidden.to(target.dtype) @ target.head.to(target.dtype).T).float()
    best = logits.topk(top_k, -1)
    behind = anchors[:, :, None] + torch.arange(s.block - 1, device=ids.device)  # of the token before each position
    rows = torch.arange(batch, device=ids.device)[:, None, None]
    said = taught[rows, behind].gather(-1, best.indices)
    own = logits.log_softmax(-1).gather(-1, ids[rows, behind + 1][..., None])[..., 0].exp()
    reach = (0.5 * own + 0.5).cumprod(-1)  # as D-PACE: how far a tree would have come along this text
    weight = torch.cat((torch.ones_like(reach[..., :1]), reach[..., :-1]), -1)
    flat = (hidden, ids[rows, behind], best.indices, best.values, said, weight)
    hidden, before, tokens, values, said, weight = (part.flatten(0, 2) for part in flat)
    return Places(hidden.bfloat16(), before.short(), tokens.short(), values, said, weight)


def gather(target: Target, drafter: Drafter, stream: Tensor, plan: Plan, seconds: float, seed: int) -> list[Places]:
    """Batches of windows until the time is over."""
    born, found, last = time.time(), list[Places](), plan.length - drafter.s.block
    draw = torch.Generator().manual_seed(seed)
    while len(found) < 2 or time.time() - born < seconds:
        ids = random_windows(stream, plan.windows, plan.length, seed + len(found) + 1)
        anchors = torch.randint(plan.first, last, (plan.windows, plan.anchors), generator=draw).to(ids.device)
        found.append(places(target, drafter, ids, anchors, SelectorShape().top_k))
        if len(found) % 50 == 0:
            print(f"{time.time() - born:6.1f} s: {len(found) * len(found[0])} places", flush=True)
    return found


def fit(selector: Selector, trained: Places, plan: Plan, passes: int) -> None:
    """Over all places, cosine rate. Few places are soon learnt by heart: see `judged`."""
    adam = torch.optim.AdamW(selector.parameters(), lr=plan.rate, betas=(0.9, 0.98), weight_decay=plan.decay)
    steps = passes * -(-len(trained) // plan.batch)
    warm = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        adam, lambda n: min(1.0, (n + 1) / warm) * (1 + math.cos(math.pi * min(n / steps, 1.0))) / 2
    )
    for number in range(passes):
        order = torch.randperm(len(trained), device=trained.before.device)
        for i in range(0, len(order), plan.batch):
            loss, _ = divergence(selector, trained[order[i : i + plan.batch]])
            torch.autograd.backward(loss)
            adam.step()
            adam.zero_grad(set_to_none=True)
            schedule.step()
        print(f"rank {selector.shape.rank} pass {number + 1}: {float(loss.detach()):.4f}", flush=True)


@torch.no_grad()
def judged(selector: Selector | None, left_out: Places) -> dict[str, float]:
    lacks, right = divergence(selector, left_out)
    return {"nats": round(float(lacks), 4), "first_right": round(float(right), 4)}


def write_selector(selector: Selector, folder: Path) -> None:
    """The folder that belongs beside the drafter's weights, under DFlash 2's names."""
    folder = folder / str(selector.shape.rank) / "selector"
    folder.mkdir(parents=True, exist_ok=True)
    names = ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
    tensors = {f"candidate_selector.{n}": bf16(getattr(selector, n.removesuffix(".weight"))) for n in names}
    save(tensors, folder / "model.safetensors")
    write_json(folder / "config.json", {"selector_rank": selector.shape.rank, "selector_top_k": selector.shape.top_k})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, default=Path(".carry/corpus"))
    parser.add_argument("--target", type=Path, default=Path("models/sapling"))
    parser.add_argument("--drafter", type=Path, default=Path("models/sapling-dflash"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[SelectorShape().rank])
    parser.add_argument("--seconds", type=float, default=600, help="of passes over text")
    parser.add_argument("--passes", type=int, default=1, help="over the places; 0: as the corpus's pairs say")
    parser.add_argument("--seed", type=int, default=40)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tiny", action="store_true", help="short windows, to see that it runs")
    args = parser.parse_args()
    born, plan = time.time(), TINY_PLAN if args.tiny else Plan()
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16  # few CPUs multiply in bf16
    target = freeze(read_target(args.target, dtype).to(args.device))
    drafter = read_drafter(args.drafter).to(args.device)
    stream = read_stream(args.corpus, "train[0-9]*", args.device)
    found = gather(target, drafter, stream, plan, args.seconds, args.seed)
    trained = Places.joined([part for n, part in enumerate(found) if n % LEFT_OUT])
    left_out = Places.joined(found[::LEFT_OUT])
    figures: dict[str, object] = {
        "places": len(trained),
        "left_out": len(left_out),
        "marginals": judged(None, left_out),
    }
    torch.manual_seed(args.seed)
    for rank in args.ranks:
        selector = Selector(drafter.s.vocab, drafter.s.hidden, SelectorShape(rank)).to(args.device)
        selector.start_from(stream, trained.hidden.float().mean(0))
        figures[f"rank_{rank}_start"] = judged(selector, left_out)
        if args.passes:
            fit(selector, trained, plan, args.passes)
        write_selector(selector, args.out)
        figures[f"rank_{rank}"] = judged(selector, left_out)
        write_json(args.out / "train_selector.json", figures)
    print(f"{time.time() - born:.1f} s", figures, flush=True)


if __name__ == "__main__":
    main()
