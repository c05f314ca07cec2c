"""Tokens per step of the two checkpoints on held-out prompts, T=0, fp32.

python -m models.train.acceptance --device cpu --limit 100
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from models.train import tokenizer_ids as tok
from models.train.drafter import Drafter
from models.train.export import read_drafter, read_target
from models.train.generate import freeze, write
from models.train.target import Target
from models.train.tokenizer import load
from models.train.trees import BUDGETS, draft_everywhere, tokens_per_step

LOOKAHEAD = 8


@dataclass(frozen=True)
class Text:
    """One greedy text: all ids, where the continuation starts, and how many of its tokens are walked."""

    ids: Tensor
    first: int
    count: int


def chat_prompt(request: str) -> str:
    return f"<|im_user|>user<|im_middle|>{request}<|im_end|><|im_assistant|>assistant<|im_middle|><think></think>"


def prompts(path: Path, field: str, limit: int) -> list[str]:
    records = [json.loads(line) for line in path.read_text().splitlines()][:limit]
    return [chat_prompt(r["request"]) if field == "request" else r[field] for r in records]


def greedy(target: Target, encoded: list[list[int]], new: int, device: str) -> list[Text]:
    """Write `new` tokens (and a lookahead for the last step's labels) after each prompt, stop tokens cut."""
    ids = torch.full((len(encoded), max(map(len, encoded)) + new + LOOKAHEAD), tok.PAD)
    for row, prompt in zip(ids, encoded, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    lengths = torch.tensor([len(prompt) for prompt in encoded], device=device)
    out = write(target, ids.to(device), lengths, torch.zeros(len(encoded), device=device))
    stops = torch.isin(out, torch.tensor([tok.EOS, tok.IM_END], device=device))
    texts = []
    for row, stop, prompt in zip(out, stops, encoded, strict=True):
        first = len(prompt)
        ends = stop[first : first + new].nonzero()[:, 0].tolist()
        texts.append(Text(row[: first + new + LOOKAHEAD], first, ends[0] if ends else new))
    return texts


def repeated(ids: list[int], n: int = 8) -> float:
    """Share of n-grams that occurred before in the same text."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / max(1, len(grams))


def measure(target: Target, drafter: Drafter, texts: list[Text]) -> dict[str, object]:
    """Mean tokens per step by budget (0 = the chain), over texts of at least 16 tokens."""
    rows: list[dict[int, float]] = []
    repeats = []
    for text in (t for t in texts if t.count >= 16):
        marginals = draft_everywhere(target, drafter, text.ids, text.first, text.count)
        future = text.ids[text.first :].tolist()
        rows.append({b: tokens_per_step(marginals, future, b) for b in (0, *BUDGETS)})
        repeats.append(repeated(future[: text.count]))
    if not rows:
        return {"prompts": 0}
    chain = torch.tensor([r[0] for r in rows])
    fresh = [c for c, r in zip(chain.tolist(), repeats, strict=True) if r < 0.1]
    out: dict[str, object] = {"prompts": len(rows), "chain": round(float(chain.mean()), 3)}
    out |= {f"tree_{b}": round(sum(r[b] for r in rows) / len(rows), 3) for b in BUDGETS}
    out["chain_quantiles_10_50_90"] = [round(float(q), 2) for q in chain.quantile(torch.tensor([0.1, 0.5, 0.9]))]
    out["repeated_8_grams"] = round(sum(repeats) / len(repeats), 3)
    out["chain_where_few_repeats"] = [round(sum(fresh) / max(1, len(fresh)), 3), len(fresh)]
    return out


def evaluate(
    target: Target, drafter: Drafter, folder: Path, vocabulary: Path, limit: int, new: int
) -> dict[str, object]:
    """All three prompt forms: head with file context, head alone, chat."""
    encoding, device = load(vocabulary), str(target.embed.device)
    out: dict[str, object] = {}
    for name, file, field in (
        ("context", "heads.jsonl", "prompt"), ("alone", "heads.jsonl", "head"), ("chat", "chat.jsonl", "request"),
    ):  # fmt: skip
        encoded = [encoding.encode(p, allowed_special="all") for p in prompts(folder / file, field, limit)]
        out[name] = measure(target, drafter, greedy(target, encoded, new, device))
        print(name, json.dumps(out[name]), flush=True)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=Path("models/sapling"))
    parser.add_argument("--drafter", type=Path, default=Path("models/sapling-dflash"))
    parser.add_argument("--heldout", type=Path, default=Path("models/heldout"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--limit", type=int, default=100)
    parser.add_argument("--new", type=int, default=96)
    args = parser.parse_args()
    target = freeze(read_target(args.target, torch.float32).to(args.device))
    drafter = read_drafter(args.drafter).to(args.device)
    evaluate(target, drafter, args.heldout, args.target, args.limit, args.new)


if __name__ == "__main__":
    main()
