"""Train the target by wall clock, export it, and evaluate what was exported.

    python -m models.train.train_target --seconds 420 --out OUT

Windows of 1,024 tokens first, of 4,096 for the last part: attention past the trained length is noise,
and the decay phase is where the long positions are learnt best. INT4 fake quantisation runs from 40 %.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from models.train.data import epochs, read_stream
from models.train.evaluate import report
from models.train.export import read_target, write_target
from models.train.muon import Muon, momentum_at
from models.train.shape import TINY_TARGET, TargetShape
from models.train.target import Moe, Target


@dataclass(frozen=True)
class Plan:
    """The schedule, in shares of the wall-clock budget."""

    seconds: float
    tokens_per_step: int = 65_536
    short: int = 1024
    long: int = 4096
    long_from: float = 0.72
    decay_from: float = 0.45
    qat_from: float = 0.40
    floor: float = 0.02
    warmup_steps: int = 150
    balance: float = 1e-3

    def factor(self, progress: float, step: int) -> float:
        """Learning-rate factor: warm-up, constant, linear decay to the floor."""
        decay = (1 - progress) / (1 - self.decay_from)
        return min(1.0, (step + 1) / self.warmup_steps) * max(self.floor, min(1.0, decay))


def cross_entropy(hidden: Tensor, head: Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor:
    logits = hidden.to(dtype) @ head.to(dtype).T
    return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten())


class Trainer:
    """Model, optimisers and compiled pieces."""

    def __init__(self, plan: Plan, device: str, compiled: bool, tiny: bool) -> None:
        torch.manual_seed(0)
        self.plan = plan
        shape = TINY_TARGET if tiny else TargetShape()
        self.model = Target(shape, torch.float32 if tiny else torch.bfloat16).to(device)
        matrices = [p for n, p in self.model.blocks.named_parameters() if p.ndim >= 2 and "router" not in n]
        small = [p for n, p in self.model.blocks.named_parameters() if p.ndim < 2 or "router" in n]
        self.muon = Muon(matrices, lr=5e-3, weight_decay=0.1)
        groups = [
            {"params": [self.model.embed], "lr": 6e-3},
            {"params": [self.model.head, self.model.norm, *small], "lr": 3e-3},
        ]
        self.adam_parameters = [self.model.embed, self.model.head, self.model.norm, *small]
        self.adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0, fused=device != "cpu")
        self.rates = [float(g["lr"]) for g in self.adam.param_groups]
        self.loss = torch.compile(cross_entropy, dynamic=False) if compiled else cross_entropy
        if compiled:
            torch._dynamo.config.cache_size_limit = 64
            for block in self.model.layers():
                block.compile(dynamic=False)

    def forward_backward(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        hidden, _, loads = self.model.hidden(batch[:, :-1])
        loss = self.loss(hidden, self.model.head, batch[:, 1:], self.model.dtype)
        torch.autograd.backward(loss)
        return loss.detach(), torch.stack([x for x in loads if len(x) > 1])

    def warm_up(self, streams: list[Iterator[Tensor]]) -> None:
        """Compile for both window lengths before the clock starts; gradients are thrown away."""
        for stream in streams:
            self.forward_backward(next(stream))
        self.model.zero_grad(set_to_none=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def step(self, batch: Tensor, progress: float, step: int) -> tuple[Tensor, Tensor]:
        factor = self.plan.factor(progress, step)
        loss, loads = self.forward_backward(batch)
        torch.nn.utils.clip_grad_norm_(self.adam_parameters, 1.0)
        for group, rate in zip(self.adam.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        self.muon.step(factor, momentum_at(step))
        self.rebalance(loads, factor)
        return loss, loads

    @torch.no_grad()
    def rebalance(self, loads: Tensor, factor: float) -> None:
        """Auxiliary-loss-free balancing: raise the bias of experts that got less than the mean."""
        moes = [b.mlp for b in self.model.layers() if isinstance(b.mlp, Moe)]
        change = (loads.mean(-1, keepdim=True) - loads).sign() * (self.plan.balance * factor)
        for moe, delta in zip(moes, change, strict=True):
            moe.bias += delta


def run(trainer: Trainer, short: Iterator[Tensor], long: Iterator[Tensor], start: float) -> dict[str, float]:
    """The training loop; the clock is read on the host, which runs at most one log line ahead."""
    plan, step, tokens = trainer.plan, 0, 0
    progress = 0.0
    while progress < 1:
        is_long = progress >= plan.long_from
        batch = next(long if is_long else short)
        if progress >= plan.qat_from:
            trainer.model.qat.fill_(1.0)
        loss, loads = trainer.step(batch, progress, step)
        tokens += batch.shape[0] * (batch.shape[1] - 1)
        step += 1
        if step % 20 == 0:
            value = float(loss)  # waits for the device, so that progress follows real time
            if step % 200 == 0:
                worst = float((loads.amax(-1) / loads.mean(-1)).max())
                print(f"{time.time() - start:6.1f} s step {step} tokens {tokens / 1e6:.1f}M loss {value:.4f} "
                      f"length {batch.shape[1] - 1} worst load {worst:.2f}", flush=True)  # fmt: skip
        progress = (time.time() - start) / plan.seconds
    return {"steps": step, "tokens": tokens, "train_loss": float(loss), "seconds": round(time.time() - start, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, default=Path(".carry/corpus"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=420)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and small steps, for a machine without a GPU")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    born = time.time()
    plan = Plan(args.seconds, tokens_per_step=1024, short=256, long=512) if args.tiny else Plan(args.seconds)
    train = read_stream(args.corpus, "train[0-9]*", args.device)
    print(f"{time.time() - born:.1f} s: {len(train) / 1e6:.2f}M training tokens", flush=True)
    trainer = Trainer(plan, args.device, not args.eager, args.tiny)
    short = epochs(train, plan.short, plan.tokens_per_step // plan.short, 1)
    long = epochs(train, plan.long, plan.tokens_per_step // plan.long, 2)
    trainer.warm_up([short, long])
    print(f"{time.time() - born:.1f} s: compiled", flush=True)
    figures: dict[str, object] = dict(run(trainer, short, long, time.time()))
    if args.device != "cpu":
        figures["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    model = trainer.model
    write_target(model, args.out)
    print(f"{time.time() - born:.1f} s: exported", figures, flush=True)
    model.qat.fill_(0.0)
    figures["unquantised"] = report(model, args.corpus, args.device, full=False)
    served = read_target(args.out, torch.float32).to(args.device)
    figures["served"] = report(served, args.corpus, args.device, full=True)
    (args.out / "train_target.json").write_text(json.dumps(figures, indent=1))
    print(f"{time.time() - born:.1f} s", json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
