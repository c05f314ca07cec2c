"""What a bench runs on: the two models, prompts, and the identity of the source and checkpoints that they come from."""

from __future__ import annotations

import hashlib
import json
import platform
import random
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from hedgerow.engine.drafter import DrafterConfig, DrafterEngine
from hedgerow.engine.reads import Hidden, Reads, Tokens
from hedgerow.engine.step import LocalDrafter
from hedgerow.model.batch import SequenceRows
from hedgerow.model.cache import LatentCache
from hedgerow.model.devices import Device
from hedgerow.model.interface import Draft, Target
from hedgerow.model.lookup import Lookup
from hedgerow.model.proposer import Proposer
from hedgerow.model.select import Engine, load_drafter, load_target
from hedgerow.model.selector import FromPairs, Selector
from services.gateway.tokenizer import Tokenizer
from tests.tiny import write_tiny

Kind = Literal["marginal", "conditional", "lookup"]
KINDS: tuple[Kind, ...] = ("marginal", "conditional", "lookup")
ROOT = Path(__file__).resolve().parents[1]
SOURCE = ("kernels", "kernels/cpu", "kernels/gpu", "hedgerow/model", "hedgerow/engine")  # what decides tokens


@dataclass(frozen=True)
class Subjects:
    """Models and prompts."""

    model: Target
    draft_model: Draft
    prompts: list[list[int]]
    vocabulary: Sequence[bytes]
    eos: frozenset[int]
    selector: Selector | None = None  # of the drafter, where it has one

    @classmethod
    def read(
        cls,
        target: Path,
        drafter: Path,
        heads: Path,
        most_tokens: int,
        engine: Engine = "auto",
        threads: int = 1,
        device: Device = "cpu",
        amplitude: float | None = None,
    ) -> Subjects:
        """The checkpoints in their folders, and the prompts of a jsonl file, cut at the front to `most_tokens`."""
        draft_model = load_drafter(drafter, target, engine, threads, device=device, amplitude=amplitude)
        model = load_target(target, draft_model.feature_layers, engine, threads, device=device)
        tokenizer = Tokenizer.from_folder(target)
        texts = [json.loads(line)["prompt"] for line in heads.read_text(encoding="utf-8").splitlines()]
        prompts = [tokenizer.encode(text)[-most_tokens:] for text in texts]
        eos, selector = frozenset(model.config.eos_token_ids), Selector.find(drafter, draft_model.config)
        return cls(model, draft_model, prompts, tokenizer.pieces, eos, selector)

    @classmethod
    def tiny(cls, prompts: int = 40, engine: Engine = "auto") -> Subjects:
        """Random weights and prompts."""
        with tempfile.TemporaryDirectory() as folder:
            paths = write_tiny(Path(folder))
            draft_model = load_drafter(paths.drafter, paths.target, engine)
            model = load_target(paths.target, paths.feature_layers, engine)
        choose = random.Random(0)
        texts = [[choose.randrange(256) for _ in range(choose.randint(1, 150))] for _ in range(prompts)]
        vocabulary = [b""] * model.config.vocab_size
        return cls(model, draft_model, texts, vocabulary, frozenset(model.config.eos_token_ids))

    @property
    def identity(self) -> dict[str, str]:
        """Equal for two runs whose results may be added up."""
        return {
            "source": source_hash(),
            "target": self.model.checkpoint_hash[:16],
            "drafter": self.draft_model.checkpoint_hash[:16],
            "kernel_law": self.model.kernel_law,
            "architecture": self.model.architecture,
        }

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Of drafters, that these can be."""
        return KINDS if self.selector is not None else tuple(kind for kind in KINDS if kind != "conditional")

    def drafter(self, kind: Kind = "marginal") -> LocalDrafter:
        made: Draft | Proposer = self.draft_model
        if kind == "lookup":
            config = self.model.config
            made = Lookup(config.vocab_size, config.max_position_embeddings)
        elif kind == "conditional":
            assert self.selector is not None, "the drafter has no selector"
            made = FromPairs(self.draft_model, self.selector)
        return LocalDrafter(DrafterEngine(made, DrafterConfig()))

    def reads(self, kind: Kind = "marginal") -> Reads:
        """What an engine keeps for that drafter."""
        return Tokens() if kind == "lookup" else Hidden(self.model.feature_width)


def source_hash() -> str:
    """SHA-256 over the source files that decide tokens, the first 16 digits."""
    digest = hashlib.sha256()
    for folder in SOURCE:
        for path in sorted(p for p in (ROOT / folder).iterdir() if p.suffix in (".py", ".c", ".h")):
            digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def machine() -> dict[str, str]:
    """The commit and the machine, for a result's reader."""
    command = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    names = [line.split(":", 1)[1].strip() for line in cpu_lines() if line.startswith("model name")]
    return {"commit": commit, "cpu": names[0] if names else platform.machine(), "torch": torch.__version__}


def cpu_lines() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


@torch.inference_mode()
def logit_gap(model: Target, tokens: Sequence[int], first: int, second: int) -> float:
    """How much larger `first`'s logit is than `second`'s after `tokens`."""
    pages = range(-(-len(tokens) // LatentCache.page_size))
    last = len(tokens) - 1
    rows = SequenceRows(0, pages, tokens, range(-1, last), [last], True)
    logits = model.forward([rows], model.new_cache(len(pages))).logits[0]
    return float(logits[first] - logits[second])
