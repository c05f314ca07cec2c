"""Train the drafter on text that the served target writes, then export and evaluate it.

    python -m models.train.train_drafter --target OUT --out OUT_DRAFTER --seconds 275
    python -m models.train.train_drafter --target TINY --out OUT --seconds 3 --tiny --eager --device cpu

What moves acceptance is the volume of distinct target-written text: corpus text teaches little (its
continuation is not the target's) and a small set is memorised within a minute.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from models.train import tokenizer_ids as tok
from models.train.acceptance import evaluate
from models.train.data import chat_prompts, random_windows, read_stream
from models.train.drafter import Drafter, Losses, d_pace, labels_at
from models.train.export import read_drafter, read_target, write_drafter
from models.train.generate import freeze, write
from models.train.muon import Muon, momentum_at
from models.train.shape import TINY_DRAFTER, DrafterShape
from models.train.target import Target


@dataclass(frozen=True)
class Plan:
    """How much text, in which shapes, and the schedule in shares of the wall-clock budget."""

    seconds: float
    seed: int = 0
    rate: float = 4e-3
    code: int = 98_304
    chat: int = 16_384
    long: int = 1024
    batch: int = 8192
    length: int = 320
    prompt: int = 160
    long_length: int = 4096
    long_new: int = 320
    sequences: int = 128
    anchors: int = 40
    long_sequences: int = 8
    long_anchors: int = 64
    long_every: int = 16
    decay_from: float = 0.30
    floor: float = 0.02
    warmup_steps: int = 100

    def factor(self, progress: float, step: int) -> float:
        decay = (1 - progress) / (1 - self.decay_from)
        return min(1.0, (step + 1) / self.warmup_steps) * max(self.floor, min(1.0, decay))


TINY_PLAN = Plan(
    seconds=3, code=32, chat=8, long=2, batch=32, length=192, prompt=160, long_length=256, long_new=32, sequences=8,
    anchors=4, long_sequences=2, long_anchors=4,
)  # fmt: skip


@dataclass
class Pool:
    """Target-written sequences with their features and the range of anchors to draw from."""

    ids: Tensor
    features: Tensor
    first: Tensor
    last: Tensor


def temperatures(count: int, device: str) -> Tensor:
    """Greedy for three quarters of the rows, 0.8 for the rest."""
    return torch.where(torch.arange(count, device=device) % 4 == 3, 0.8, 0.0)


def code_prompts(plan: Plan, train: Tensor, fresh: Tensor) -> tuple[Tensor, Tensor]:
    """Windows of source: four of five from training files, one of five from files the target never saw."""
    unseen = plan.code // 5
    parts = [
        random_windows(train, plan.code - unseen, plan.prompt, plan.seed + 1),
        random_windows(fresh, unseen, plan.prompt, plan.seed + 2),
    ]
    padded = torch.full((plan.code, plan.length), tok.PAD, device=train.device)
    padded[:, : plan.prompt] = torch.cat(parts)
    return padded, torch.full((plan.code,), plan.prompt, device=train.device)


def all_chat_prompts(plan: Plan, train: Tensor, fresh: Tensor) -> tuple[Tensor, Tensor]:
    unseen = plan.chat // 5
    parts = [
        chat_prompts(train, plan.chat - unseen, plan.length, plan.seed + 3),
        chat_prompts(fresh, unseen, plan.length, plan.seed + 4),
    ]
    return torch.cat([ids for ids, _ in parts]), torch.cat([lengths for _, lengths in parts])


def long_prompts(plan: Plan, train: Tensor) -> tuple[Tensor, Tensor]:
    """Windows of the trained length whose last part is the target's: for anchors with far context."""
    ids = random_windows(train, plan.long, plan.long_length, plan.seed + 5)
    return ids, torch.full((plan.long,), plan.long_length - plan.long_new, device=train.device)


@torch.inference_mode()
def features_of(target: Target, ids: Tensor, layers: tuple[int, ...]) -> Tensor:
    rows = max(1, 131_072 // ids.shape[1])
    out = torch.empty((*ids.shape, len(layers) * target.s.hidden), dtype=target.dtype, device=ids.device)
    for i in range(0, len(ids), rows):
        out[i : i + rows] = torch.cat(target.hidden(ids[i : i + rows], layers)[1], -1)
    return out


def write_all(target: Target, prompts: Tensor, lengths: Tensor, batch: int) -> Tensor:
    """The target's text after every prompt, `batch` sequences at a time."""
    texts = []
    for i in range(0, len(prompts), batch):
        heat = temperatures(len(lengths[i : i + batch]), str(prompts.device))
        texts.append(write(target, prompts[i : i + batch], lengths[i : i + batch], heat).clone())
    return torch.cat(texts)


def pool_of(target: Target, ids: Tensor, lengths: Tensor, shape: DrafterShape) -> Pool:
    """Keep the features of written texts; anchors stop at the first end of turn or document."""
    position = torch.arange(ids.shape[1], device=ids.device)
    stop = ((ids == tok.EOS) | (ids == tok.IM_END)) & (position >= lengths[:, None])
    end = torch.where(stop.any(1), stop.float().argmax(1), ids.shape[1])
    last = end.clamp_max(ids.shape[1] - shape.block).maximum(lengths)
    return Pool(ids.short(), features_of(target, ids, shape.target_layer_ids), lengths, last)


class Trainer:
    def __init__(self, plan: Plan, target: Target, drafter: Drafter, compiled: bool) -> None:
        self.plan, self.target, self.drafter = plan, target, drafter
        self.muon = Muon([p for p in self.drafter.parameters() if p.ndim == 2], lr=plan.rate, weight_decay=0.05)
        self.norms: list[nn.Parameter] = [p for p in self.drafter.parameters() if p.ndim == 1]
        self.adam = torch.optim.AdamW(self.norms, lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
        self.head = target.head.to(target.dtype).clone()
        self.embed = target.embed.clone()
        self.measure = torch.compile(self.losses, dynamic=False) if compiled else self.losses

    def losses(self, features: Tensor, ids: Tensor, anchors: Tensor) -> Losses:
        hidden = self.drafter(features, ids, anchors, self.embed)
        logits = hidden.to(features.dtype) @ self.head.T
        return d_pace(logits, labels_at(ids, anchors, self.drafter.s.block))

    def batch(self, pool: Pool, rows: Tensor, anchors: int) -> Losses:
        first, last = pool.first[rows, None], pool.last[rows, None]
        share = torch.rand((len(rows), anchors), device=rows.device)
        at = first + (share * (last - first + 1)).long()
        return self.measure(pool.features[rows], pool.ids[rows].long(), at)

    def step(self, result: Losses, progress: float, step: int) -> None:
        factor = self.plan.factor(progress, step)
        torch.autograd.backward(result.loss)
        torch.nn.utils.clip_grad_norm_(self.norms, 1.0)
        self.adam.param_groups[0]["lr"] = 2e-3 * factor
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        self.muon.step(factor, momentum_at(step))

    def run(self, short: Pool, long: Pool) -> dict[str, float]:
        """Every `long_every`-th step is one over long contexts."""
        plan, device = self.plan, short.ids.device
        torch.autograd.backward(self.batch(short, torch.arange(plan.sequences, device=device), plan.anchors).loss)
        far = torch.arange(plan.long_sequences, device=device)
        torch.autograd.backward(self.batch(long, far, plan.long_anchors).loss)
        self.drafter.zero_grad(set_to_none=True)
        start, step, passes, progress = time.time(), 0, 0.0, 0.0
        order = torch.randperm(len(short.ids), device=device)
        cursor = 0
        while progress < 1:
            if step % plan.long_every == plan.long_every - 1:
                rows = torch.randint(len(long.ids), (plan.long_sequences,), device=device)
                result = self.batch(long, rows, plan.long_anchors)
            else:
                if cursor + plan.sequences > len(order):
                    order, cursor = torch.randperm(len(short.ids), device=device), 0
                result = self.batch(short, order[cursor : cursor + plan.sequences], plan.anchors)
                cursor, passes = cursor + plan.sequences, passes + plan.sequences / len(order)
            self.step(result, progress, step)
            step += 1
            if step % 20 == 0:
                value = float(result.accepted)
                if step % 400 == 0:
                    print(f"{time.time() - start:6.1f} s step {step} passes {passes:.2f} "
                          f"accepted {value:.3f}", flush=True)  # fmt: skip
            progress = (time.time() - start) / plan.seconds
        return {"steps": step, "passes": round(passes, 2), "accepted_in_training": float(result.accepted)}


def written(target: Target, plan: Plan, corpus: Path, shape: DrafterShape) -> tuple[Pool, Pool]:
    """The pool of short texts (source and chat) and that of long ones."""
    device, born = str(target.embed.device), time.time()
    train, fresh, talk = (read_stream(corpus, name, device) for name in ("train[0-9]*", "drafter", "drafter_chat"))
    code, chat = code_prompts(plan, train, fresh), all_chat_prompts(plan, train, talk)
    texts = [write_all(target, *code, plan.batch), write_all(target, *chat, plan.batch)]
    print(f"{time.time() - born:.1f} s: wrote {len(code[0])} texts after source, {len(chat[0])} answers", flush=True)
    short = pool_of(target, torch.cat(texts), torch.cat((code[1], chat[1])), shape)
    ids, lengths = long_prompts(plan, train)
    long = pool_of(target, write_all(target, ids, lengths, 512), lengths, shape)
    print(f"{time.time() - born:.1f} s: features and {len(ids)} long texts", flush=True)
    return short, long


def plan_of(args: argparse.Namespace) -> Plan:
    base = TINY_PLAN if args.tiny else Plan(0)
    share = args.scale
    plan = replace(base, seconds=args.seconds, seed=args.seed)
    if share != 1:
        sizes = (max(512, int(base.code * share)), max(128, int(base.chat * share)), max(8, int(base.long * share)))
        plan = replace(plan, code=sizes[0], chat=sizes[1], long=sizes[2])
    return replace(plan, rate=2.5e-3, decay_from=0.05) if args.start else plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, default=Path(".carry/corpus"))
    parser.add_argument("--heldout", type=Path, default=Path("models/heldout"))
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--vocabulary", type=Path, default=Path("models/sapling"))
    parser.add_argument("--start", type=Path, help="a drafter to go on from")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=275)
    parser.add_argument("--seed", type=int, default=10, help="another seed: other prompts, so fresh text")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the text to write (smoke runs)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a few short texts of a tiny target, without a GPU")
    args = parser.parse_args()
    born, plan = time.time(), plan_of(args)
    dtype = torch.float32 if args.tiny else torch.bfloat16  # few CPUs multiply in bf16
    target = freeze(read_target(args.target, dtype).to(args.device))
    shape = TINY_DRAFTER if args.tiny else DrafterShape()
    short, long = written(target, plan, args.corpus, shape)
    torch.manual_seed(0)
    drafter = (read_drafter(args.start) if args.start else Drafter(shape)).to(args.device)
    trainer = Trainer(plan, target, drafter, not args.eager)
    figures: dict[str, object] = dict(trainer.run(short, long))
    write_drafter(trainer.drafter, args.out)
    print(f"{time.time() - born:.1f} s: exported", figures, flush=True)
    exact = freeze(read_target(args.target, torch.float32).to(args.device))
    limit, new = (4, 16) if args.tiny else (100, 96)
    exported = read_drafter(args.out).to(args.device)
    figures["acceptance"] = evaluate(exact, exported, args.heldout, args.vocabulary, limit, new)
    (args.out / "train_drafter.json").write_text(json.dumps(figures, indent=1))
    print(f"{time.time() - born:.1f} s", flush=True)


if __name__ == "__main__":
    main()
