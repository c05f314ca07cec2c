"""Train a candidate selector on text that the served target writes; target and drafter stay as they are.

    python -m models.train.teach_selector --ranks 16 32 64 --seconds 100 --out OUT    # what is bundled: OUT/64/selector

At random places of its texts the selector learns what the target wrote there, among the drafter's candidates; places
count as much as the accepted length depends on them. Writes OUT/RANK/selector, a folder that belongs beside the
drafter's weights, for each of `--ranks`, and says what each does on text that it was not trained on. `train_selector`
makes one without a GPU, and a worse one.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from models.train.data import read_stream
from models.train.drafter import Drafter, labels_at
from models.train.export import read_drafter, read_target, write_json
from models.train.generate import freeze
from models.train.selector import Selector, SelectorShape
from models.train.shape import TINY_DRAFTER
from models.train.target import Target
from models.train.train_drafter import TINY_PLAN, Plan, Pool, all_chat_prompts, code_prompts, pool_of, write_all
from models.train.train_selector import write_selector

PLAN = Plan(0, code=49_152, chat=8192, batch=8192)
WARMUP = 100
KEPT_BACK = 32  # one text in so many is not trained on


@dataclass(frozen=True)
class Candidates:
    """Per position of a block: the best tokens of the marginal, `[.., K]`, their logits, and the mass they have."""

    tokens: Tensor
    logits: Tensor
    mass: Tensor  # log


@dataclass(frozen=True)
class SelectorLosses:
    """The loss; tokens per step of the selector's chains and of the marginals', over all anchors of the batch."""

    loss: Tensor
    chain: Tensor
    marginal_chain: Tensor


def candidates(logits: Tensor, top_k: int) -> Candidates:
    logits = logits.float()
    best = logits.topk(top_k, -1)
    return Candidates(best.indices, best.values, best.values.logsumexp(-1) - logits.logsumexp(-1))


def losses(selector: Selector, found: Candidates, hidden: Tensor, anchors: Tensor, labels: Tensor) -> SelectorLosses:
    """hidden `[N, L, H]`, anchors `[N]`, labels `[N, L]`. Positions are weighted by the accepted length that depends on
    them, as in D-PACE; a label that is no candidate cannot be learnt, and ends what depends on it."""
    before = torch.cat((anchors[:, None], labels[:, :-1]), 1)
    added = selector.added(hidden.flatten(0, 1), before.flatten(), found.tokens.flatten(0, 1))
    scores = found.logits + added.view(found.logits.shape)
    is_label = found.tokens == labels[..., None]
    there = is_label.any(-1)
    entropy = scores.logsumexp(-1) - (scores * is_label).sum(-1)
    with torch.no_grad():
        probability = torch.where(there, (found.mass - entropy).exp(), 0.0)
        reach = (0.5 * probability + 0.5).cumprod(-1)
        weight = torch.where(there, reach.flip(-1).cumsum(-1).flip(-1), 0.0)
        right = labels == found.tokens.gather(-1, scores.argmax(-1, keepdim=True))[..., 0]
        marginal = labels == found.tokens[..., 0]
        chains = [1 + hit.float().cumprod(-1).sum(-1).mean() for hit in (right, marginal)]
    return SelectorLosses((weight * torch.where(there, entropy, 0.0)).sum(-1).mean(), *chains)


class Trainer:
    """Selectors of several ranks over the same frozen drafter, side by side."""

    def __init__(self, plan: Plan, target: Target, drafter: Drafter, shapes: list[SelectorShape], rate: float) -> None:
        self.plan, self.target, self.drafter, self.rate = plan, target, drafter, rate
        device = target.embed.device
        self.selectors = [Selector(drafter.s.vocab, drafter.s.hidden, shape).to(device) for shape in shapes]
        parameters = [p for selector in self.selectors for p in selector.parameters()]
        self.adam = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
        self.head, self.embed = target.head.to(target.dtype).clone(), target.embed.clone()

    def blocks(self, pool: Pool, rows: Tensor) -> tuple[Candidates, Tensor, Tensor, Tensor]:
        """Random anchors of `rows`: candidates, hidden states, anchors, labels, each `[N, ..]`."""
        first, last = pool.first[rows, None], pool.last[rows, None]
        share = torch.rand((len(rows), self.plan.anchors), device=rows.device)
        at, ids = first + (share * (last - first + 1)).long(), pool.ids[rows].long()
        with torch.no_grad():
            hidden = self.drafter(pool.features[rows], ids, at, self.embed).flatten(0, 1)
            logits = hidden.to(self.target.dtype) @ self.head.T
            found = candidates(logits, self.selectors[0].shape.top_k)
        return found, hidden, ids.gather(1, at).flatten(), labels_at(ids, at, self.drafter.s.block).flatten(0, 1)

    def step(self, pool: Pool, rows: Tensor, factor: float) -> list[SelectorLosses]:
        blocks = self.blocks(pool, rows)
        found = [losses(selector, *blocks) for selector in self.selectors]
        torch.autograd.backward([each.loss for each in found])
        self.adam.param_groups[0]["lr"] = self.rate * factor
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        return found

    def run(self, pool: Pool, seconds: float) -> int:
        """Texts 0, KEPT_BACK, 2 KEPT_BACK, ... are left out. Gives the number of steps."""
        everything = torch.arange(len(pool.ids), device=pool.ids.device)
        trained = everything[everything % KEPT_BACK > 0]
        start, step, cursor, order = time.time(), 0, len(trained), trained
        while (progress := (time.time() - start) / seconds) < 1:
            if cursor + self.plan.sequences > len(order):
                order, cursor = trained[torch.randperm(len(trained), device=trained.device)], 0
            factor = min(1.0, (step + 1) / WARMUP) * max(0.02, 1 - progress)
            found = self.step(pool, order[cursor : cursor + self.plan.sequences], factor)
            cursor, step = cursor + self.plan.sequences, step + 1
            if step % 200 == 0:
                said = ", ".join(f"{float(e.chain):.3f} (marginals {float(e.marginal_chain):.3f})" for e in found)
                print(f"{time.time() - start:6.1f} s step {step} {said}", flush=True)
        return step

    @torch.no_grad()
    def judge(self, pool: Pool, batches: int) -> list[dict[str, float]]:
        """On the texts that were left out: tokens per step of chains."""
        rows = torch.arange(0, len(pool.ids), KEPT_BACK, device=pool.ids.device)
        sums = torch.zeros(len(self.selectors), 2)
        for i in range(batches):
            part = rows[(i * self.plan.sequences) % len(rows) :][: self.plan.sequences]
            blocks = self.blocks(pool, part)
            for n, selector in enumerate(self.selectors):
                each = losses(selector, *blocks)
                sums[n] += torch.tensor([float(each.chain), float(each.marginal_chain)])
        means = (sums / batches).tolist()
        return [
            {"rank": s.shape.rank, "chain": round(a, 3), "marginal_chain": round(b, 3)}
            for s, (a, b) in zip(self.selectors, means, strict=True)
        ]


def text_pool(target: Target, plan: Plan, corpus: Path, drafter: Drafter) -> Pool:
    device = str(target.embed.device)
    train, fresh, talk = (read_stream(corpus, name, device) for name in ("train[0-9]*", "drafter", "drafter_chat"))
    code, chat = code_prompts(plan, train, fresh), all_chat_prompts(plan, train, talk)
    texts = [write_all(target, *code, plan.batch), write_all(target, *chat, plan.batch)]
    order = torch.randperm(plan.code + plan.chat, device=device)
    return pool_of(target, torch.cat(texts)[order], torch.cat((code[1], chat[1]))[order], drafter.s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, default=Path(".carry/corpus"))
    parser.add_argument("--target", type=Path, default=Path("models/sapling"))
    parser.add_argument("--drafter", type=Path, default=Path("models/sapling-dflash"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64])
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--seed", type=int, default=40)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the text to write (smoke runs)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a few short texts of a tiny target, without a GPU")
    args = parser.parse_args()
    born, base = time.time(), TINY_PLAN if args.tiny else PLAN
    plan = replace(base, seed=args.seed, code=int(base.code * args.scale), chat=int(base.chat * args.scale))
    dtype = torch.float32 if args.tiny else torch.bfloat16
    target = freeze(read_target(args.target, dtype).to(args.device))
    drafter = read_drafter(args.drafter).to(args.device)
    assert args.tiny == (drafter.s == TINY_DRAFTER), "--tiny is for a tiny target's drafter"
    pool = text_pool(target, plan, args.corpus, drafter)
    print(f"{time.time() - born:.1f} s: wrote {len(pool.ids)} texts", flush=True)
    torch.manual_seed(args.seed)
    trainer = Trainer(plan, target, drafter, [SelectorShape(rank) for rank in args.ranks], args.rate)
    steps = trainer.run(pool, args.seconds)
    figures = {"steps": steps, "texts": len(pool.ids), "left_out": trainer.judge(pool, 2 if args.tiny else 40)}
    for selector in trainer.selectors:
        write_selector(selector, args.out)
    write_json(args.out / "train_selector.json", figures)
    print(f"{time.time() - born:.1f} s", json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
