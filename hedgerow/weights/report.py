"""What `hedgerow inspect` finds out about a folder: what it is, what it needs, what is wrong with it.

By names, sizes and headers alone: a folder of 594 GB takes seconds. Everything that is wrong is listed, not the first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hedgerow.errors import InvalidRequest, printable
from hedgerow.model.config import K2Config
from hedgerow.model.draft_config import ARCHITECTURES, DraftConfig
from hedgerow.model.draft_tensors import faults as draft_faults
from hedgerow.model.draft_tensors import selector_faults
from hedgerow.model.fields import Fields
from hedgerow.model.folder import Stored, divides, faults, parameters, size_faults, stored
from hedgerow.model.headers import CheckpointError
from hedgerow.model.loader import checkpoint_hash, share_bytes
from hedgerow.model.manifest import Manifest
from hedgerow.model.memory import CARDS, USABLE, token, tokens
from hedgerow.model.reading import Watcher
from hedgerow.model.selector import BESIDE
from hedgerow.model.tensors import WHOLE, Share, last, layer, matrix, tensors
from hedgerow.weights.convert import verify
from hedgerow.weights.values import check_values
from hedgerow.weights.vocabulary import vocabulary_faults

RANKS = (1, 2, 4, 8, 16)
MOST = 1000  # faults that are kept; all are counted


class Fault(NamedTuple):
    """What keeps the folder from being served."""

    file: str
    what: str  # tensor or field; "" where the file itself is at fault
    found: str
    needed: str


class Need(NamedTuple):
    """Memory of each of `ranks` ranks."""

    ranks: int
    weights: int  # bytes
    cache: Mapping[str, int]  # card -> tokens beside the weights as a GPU keeps them; 0: they do not fit


@dataclass
class Report:
    """`needs` is empty where the configuration could not be read; `told` are the facts in a person's order."""

    folder: str
    kind: str = "nothing that can be served"
    told: dict[str, str] = field(default_factory=dict)
    needs: list[Need] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    fault_count: int = 0
    bytes_per_token: int = 0

    def add(self, error: InvalidRequest) -> None:
        """A fault, by the error that loading would end with."""
        self.fault_count += 1
        if len(self.faults) < MOST:
            file = str(getattr(error, "file", self.folder))
            what = str(getattr(error, "tensor", getattr(error, "name", "")))
            self.faults.append(Fault(file, what, error.metadata["value"], error.limit))

    def as_json(self) -> str:
        plain: dict[str, Any] = {
            "folder": self.folder, "kind": self.kind, "facts": self.told, "bytes_per_token": self.bytes_per_token,
            "needs": [need._asdict() for need in self.needs], "fault_count": self.fault_count,
            "faults": [fault._asdict() for fault in self.faults], "notes": self.notes,
        }  # fmt: skip
        return json.dumps(plain, indent=1)


def inspect(folder: Path, ranks: int | None = None) -> Report:
    """`ranks`: also what keeps so many from sharing it. Raises InvalidRequest where there is no folder."""
    if not folder.is_dir():
        raise InvalidRequest("FOLDER", str(folder), "an existing folder")
    report = Report(str(folder))
    try:
        top = Fields.read(folder / "config.json")
        if top.values.get("architectures") in ARCHITECTURES:
            drafter(folder, report)
        else:
            target(folder, report, ranks)
    except InvalidRequest as error:
        report.add(error)
    code = sorted(path.name for path in folder.glob("*.py"))
    if code:
        report.notes.append(f"{len(code)} files of code in the folder, which are never run: {', '.join(code[:3])}")
    return report


def target(folder: Path, report: Report, ranks: int | None) -> None:
    c = K2Config.from_folder(folder)
    manifest = Manifest.read(folder)
    files = [stored(folder, complain=report.add)] if manifest is None else list(rank_files(folder, manifest, report))
    for found in files:
        for fault in faults(found, c, ranks or 1 if manifest is None else manifest.ranks):
            report.add(fault)
    if manifest is not None and ranks not in (None, manifest.ranks):
        report.add(CheckpointError(folder, "", f"files of {ranks} ranks", f"of {manifest.ranks}"))
    for missing in vocabulary_faults(folder, c.vocab_size):
        report.add(missing)
    if not files:
        return
    found, counts = files[0], (n for n in RANKS if shared(c, n))
    report.kind = kind(c, found, manifest, generation(folder, c))
    report.told |= facts(c, found, manifest)
    report.bytes_per_token = token(c)
    for n in counts if manifest is None else (manifest.ranks,):
        report.needs.append(Need(n, share_bytes(found, Share(0, n)), cache(c, n)))
    beside(c, report, found)


def rank_files(folder: Path, manifest: Manifest, report: Report) -> Iterator[Stored]:
    """A converted folder's, those that can be read."""
    for rank in range(manifest.ranks):
        try:
            yield stored(folder, Share(rank, manifest.ranks))
        except CheckpointError as fault:
            report.add(fault)


def shared(c: K2Config, ranks: int) -> bool:
    """Whether `ranks` ranks can share it: layers of a kind are alike."""
    ends = [matrix("model.embed_tokens", c.vocab_size, c.hidden_size), *last(c)]
    numbers = {0, c.num_hidden_layers - 1}
    return all(divides(w, ranks, "") for part in (ends, *(layer(c, n) for n in numbers)) for w in part)


def cache(c: K2Config, ranks: int) -> dict[str, int]:
    """Tokens beside the weights, by card."""
    return {card.name: tokens(c, ranks, card) for card in CARDS}


def kind(c: K2Config, s: Stored, manifest: Manifest | None, generation: str) -> str:
    """Which layout of the family."""
    if c.fp8:
        name = "K2-Instruct's layout: matrices in FP8, a scale for each block of 128 x 128"
    elif not c.int4_experts:
        name = "a K2 layout without quantisation"
    elif s.prefix:
        name = f"{generation} layout: INT4 experts in groups of 32, names under {s.prefix[:-1]}"
    else:
        name = "K2-Thinking's layout: INT4 experts in groups of 32"
    if manifest is None:
        return f"a target as published, {name}"
    return f"a target converted for {manifest.ranks} ranks (order {manifest.order}), {name}"


def generation(folder: Path, c: K2Config) -> str:
    """K2.5 and K2.6 differ in one token of config.json: the first ends at [EOS], the second at <|im_end|>."""
    top = Fields.read(folder / "config.json")
    end = top.integers("eos_token_id") or (top.inner("text_config") or top).integers("eos_token_id")
    place = end[0] - (c.vocab_size - 256) if len(end) == 1 else 0
    return {1: "K2.5's", 2: "K2.6's"}.get(place, "K2.5's and K2.6's")


def facts(c: K2Config, s: Stored, manifest: Manifest | None) -> dict[str, str]:
    weights = sum(parameters(w, "I32" if w.dtypes == ("I32",) else "") for w in tensors(c))
    files = len({entry.file for entry in s.entries.values()}) if manifest is None else manifest.ranks
    size = sum(entry.bytes for entry in s.entries.values()) * (1 if manifest is None else manifest.ranks)
    yarn = f", YaRN factor {c.rope.yarn.factor:g} beta_fast {c.rope.yarn.beta_fast:g}" if c.rope.yarn else ""
    return {
        "model": f"{c.num_hidden_layers} layers ({c.first_k_dense_replace} dense), {c.n_routed_experts} experts of "
        f"{c.moe_intermediate_size}, {c.num_experts_per_tok} a token; hidden {c.hidden_size}, "
        f"{c.num_attention_heads} heads; {weights / 1e9:.2f} G parameters",
        "text": f"context {c.max_position_embeddings:,}, vocabulary {c.vocab_size:,}, ends at "
        f"{', '.join(map(str, c.eos_token_ids)) or 'no token'}{yarn}",
        "files": f"{files} with {len(s.entries):,} tensors of the text model, {shown(size)}",
        "cache": f"{token(c):,} bytes a token on every rank",
    }


def shown(size: int) -> str:
    """Bytes for a person."""
    return f"{size / 1e9:.1f} GB" if size >= 10**9 else f"{size / 1e6:.1f} MB"


def beside(c: K2Config, report: Report, s: Stored) -> None:
    """What is no fault, and may be one: no end, and tensors that nothing reads."""
    if not c.eos_token_ids:
        report.notes.append("neither config.json nor generation_config.json names an end token")
    known = {s.prefix + w.name for w in tensors(c)}
    extra = [name for name in s.entries if name not in known]
    if extra:
        report.notes.append(f"{len(extra)} tensors that nothing here reads: {', '.join(extra[:3])}")


def drafter(folder: Path, report: Report) -> None:
    """A DFlash folder; whether it fits a target is compared when both are loaded."""
    c = DraftConfig.from_folder(folder)
    found = stored(folder, complain=report.add)
    beside = folder / BESIDE if c.selector is None and (folder / BESIDE).is_dir() else None
    for fault in (*draft_faults(found, c), *(selector_faults(beside, c) if beside else ())):
        report.add(fault)
    report.kind = "a DFlash drafter" if c.convolution is None else "a DFlash 2 drafter"
    size = sum(entry.bytes for entry in found.entries.values())
    windows = sum(window is not None for window in c.windows)
    report.told = {
        "model": f"{c.num_hidden_layers} layers ({windows} sliding), hidden {c.hidden_size}, block {c.block_size}",
        "target": f"layers {', '.join(map(str, c.target_layer_ids))}, vocabulary {c.vocab_size:,}, mask token "
        f"{c.mask_token_id}",
        "files": f"{len({e.file for e in found.entries.values()})} with {len(found.entries):,} tensors, "
        f"{shown(size)}, on one rank",
    }


def read_all(folder: Path, report: Report, watcher: Watcher | None = None) -> None:
    """Every byte: a converted folder's checksums; else what the experts' stored shapes say, and the folder's hash; and
    of both that every number is one."""
    try:
        manifest = Manifest.read(folder)
        if manifest is not None:
            verify(folder, watcher)
        elif report.needs:
            for fault in size_faults(stored(folder), K2Config.from_folder(folder)):
                report.add(fault)
        shares = [Share(rank, manifest.ranks) for rank in range(manifest.ranks)] if manifest else [WHOLE]
        for fault in check_values([stored(folder, share) for share in shares], watcher):
            report.add(fault)
        report.told["hash"] = checkpoint_hash(folder, watcher)
    except InvalidRequest as error:
        report.add(error)


def lines(report: Report, most: int = 20) -> Iterator[str]:
    """The report for a person; names of the folder's own choice steer no terminal."""
    return map(printable, _lines(report, most))


def _lines(report: Report, most: int) -> Iterator[str]:
    yield f"{report.folder}: {report.kind}"
    for name, text in report.told.items():
        yield f"  {name:<8}{text}"
    if report.needs:
        yield f"  {'ranks':<8}{'weights a rank':>15}" + "".join(f"{card.name:>21}" for card in CARDS)
    for need in report.needs:
        cells = (f"{tokens:,} tokens" if tokens else "no" for tokens in need.cache.values())
        yield f"  {need.ranks:<8}{shown(need.weights):>15}" + "".join(f"{cell:>21}" for cell in cells)
    if report.needs:
        yield f"  {'':<8}tokens of cache in {USABLE:.0%} of the card beside the weights, without a drafter; no: no fit"
        yield f"  {'':<8}a GPU keeps all of the embedding too, and dense matrices of FP8 in bfloat16"
    for note in report.notes:
        yield f"  note    {note}"
    for fault in report.faults[:most]:
        where = f"{fault.file}: {fault.what}" if fault.what else fault.file
        yield f"  wrong   {where}: found {fault.found}, needed: {fault.needed}"
    if report.fault_count > most:
        yield f"  wrong   {report.fault_count - most} more"
    yield f"  {report.fault_count} faults" if report.fault_count else "  nothing is wrong with it"
