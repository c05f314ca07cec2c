"""Checkpoint folders: the tensors behind one lookup by name, a rank's part of each, and the hash that stands for them.

A tensor is returned as float32 except where a dtype is asked for; every complaint names file, tensor, expected and
actual. Nothing of a folder is executed, and no file is opened that does not call itself safetensors.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import NamedTuple

import torch

from hedgerow.model.config import K2Config
from hedgerow.model.fields import Fields
from hedgerow.model.folder import INDEX, Stored, faults, size_faults, stored
from hedgerow.model.headers import CheckpointError, Entry
from hedgerow.model.identity import check_share, checkpoint_hash
from hedgerow.model.manifest import Manifest
from hedgerow.model.reading import DTYPES, EVERY, EVERY_LOGGED, Files, Meter, Progress, Watcher
from hedgerow.model.tensors import COLUMNS, GROUP, WHOLE, Share, Wanted, axis_of, scale_name, scale_shape
from kernels.fp8 import fp8_unpack
from kernels.int4 import int4_unpack

__all__ = ["INDEX", "Checkpoint", "CheckpointError", "PackedWeight", "checkpoint_hash", "load_embedding_and_head"]
log = logging.getLogger(__name__)
NAMES = {dtype: name for name, dtype in DTYPES.items()}
FP8 = torch.float8_e4m3fn
BORROWED = ("model.embed_tokens.weight", "lm_head.weight")
BLOCK_ROWS = 512  # of these that are hashed at once
DENSE = (torch.bfloat16, torch.float16, torch.float32)


class PackedWeight(NamedTuple):
    """An INT4 matrix as stored: value[n, k] = (nibble - 8) * scale[n, k // 32]."""

    words: torch.Tensor  # [N, K / 8] int32
    scales: torch.Tensor  # [N, K / 32] float32, of bfloat16 values


class Checkpoint:
    """The tensors of one folder, or of one rank's share of them: shapes are asked for whole, and come divided.

    `watcher` hears how far reading is, in bytes of the share; the log does if there is none. Files stay open as long as
    this lives.
    """

    def __init__(self, folder: Path, share: Share = WHOLE, watcher: Watcher | None = None) -> None:
        share.check()
        self.folder, self.share = folder, share
        self.stored: Stored = stored(folder, share)
        self.prefix = self.stored.prefix
        every = EVERY_LOGGED if watcher is None else EVERY
        self._files, self._meter = Files(), Meter(share_bytes(self.stored, share), watcher or self._log, every=every)

    def __contains__(self, name: str) -> bool:
        return self.stored.get(name) is not None

    def check(self, c: K2Config) -> None:
        """Raises the first CheckpointError that headers and stored sizes tell of, before anything is loaded."""
        for fault in chain(faults(self.stored, c, self.share.ranks), size_faults(self.stored, c)):
            raise fault

    def compare(self) -> None:
        """A converted file with its checksums, which takes as long as to read it. Raises CheckpointError."""
        check_share(self.folder, self.share)

    def raw(
        self, name: str, shape: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """The share of the stored tensor; `name` without the family's prefix, `shape` of the whole."""
        entry = self._entry(name, shape, dtypes)
        tensor = self._files.read(entry, axis_of(name), self._cut, device)
        self._meter.add(tensor.nbytes)
        return tensor

    def into(self, out: torch.Tensor, name: str, shape: Sequence[int], dtypes: Sequence[torch.dtype]) -> bool:
        """`raw`, straight into `out`; False, and nothing is read, where it is stored in another type than out's."""
        entry = self._entry(name, shape, dtypes)
        if DTYPES[entry.dtype] != out.dtype or not out.is_contiguous():
            return False
        self._files.into(out.view(-1).view(torch.uint8), entry, axis_of(name), self._cut)
        self._meter.add(out.nbytes)
        return True

    def blocks(self, name: str, shape: Sequence[int], rows: int) -> Iterator[torch.Tensor]:
        """The share of a dense tensor that is divided by rows, or not at all, `rows` rows at a time."""
        entry, axis = self._entry(name, shape, DENSE), axis_of(name)
        assert axis != COLUMNS, name
        wide = entry.bytes // entry.shape[0]
        held = range(entry.shape[0]) if axis is None else self._cut.of(entry.shape[0])
        for at in range(held.start, held.stop, rows):
            count = min(rows, held.stop - at)
            start = entry.start + at * wide
            part = entry._replace(shape=(count, *entry.shape[1:]), start=start, end=start + count * wide)
            block = self._files.read(part, None, WHOLE)
            self._meter.add(block.nbytes)
            yield block

    def part(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The share's shape of a tensor that is `shape` as a whole."""
        return Wanted(name, tuple(shape), (), axis_of(name)).part(self.share.ranks)

    def stacked(
        self,
        names: Sequence[str],
        shape: Sequence[int],
        dtypes: torch.dtype | Sequence[torch.dtype],
        device: torch.device | str = "cpu",
    ) -> torch.Tensor:
        """The shares of tensors of one shape, and of the first one's type, [names, ...]: in one read where they lie
        side by side."""
        allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else dtypes
        dtype = DTYPES[self._entry(names[0], shape, allowed).dtype]
        entries = [self._entry(name, shape, (dtype,)) for name in names]
        axis = axis_of(names[0])
        out = torch.empty((len(names), *self.part(names[0], shape)), dtype=dtype, device=device)
        flat = out.view(-1).view(torch.uint8)
        first, last = entries[0], entries[-1]
        if self._cut == WHOLE and all(a.end == b.start and a.file == b.file for a, b in pairwise(entries)):
            self._files.into(flat, first._replace(end=last.end), None, WHOLE)
        else:
            for place, entry in zip(flat.chunk(len(entries)), entries, strict=True):
                self._files.into(place, entry, axis, self._cut)
        self._meter.add(out.nbytes)
        return out

    def stacked_packed(
        self, names: Sequence[str], rows: int, columns: int, device: torch.device | str = "cpu"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """INT4 matrices of one size as they are stored: words [names, N, K / 8] and scales [names, N, K / 32]."""
        for name in names:
            self.check_shape(name, rows, columns)
        words = [f"{name}.weight_packed" for name in names]
        scales = [f"{name}.weight_scale" for name in names]
        return (
            self.stacked(words, (rows, columns // 8), torch.int32, device),
            self.stacked(scales, (rows, columns // GROUP), DENSE, device),
        )

    def _log(self, progress: Progress) -> None:
        which = f", rank {self.share.rank} of {self.share.ranks}" if self.share != WHOLE else ""
        log.info("loading %s%s: %s", self.folder, which, progress)

    @property
    def _cut(self) -> Share:
        """What of a stored tensor is this share's: all of it, in a converted file."""
        return self.share if self.stored.parts == WHOLE else WHOLE

    def _entry(self, name: str, shape: Sequence[int], dtypes: Sequence[torch.dtype]) -> Entry:
        """Raises CheckpointError unless it is there in this form."""
        entry, full = self.stored.get(name), self.prefix + name
        if entry is None:
            raise CheckpointError(self.folder, full, f"a tensor of shape {list(shape)}", "missing")
        wanted = Wanted(name, tuple(shape), (), axis_of(name))
        there = wanted.part(self.stored.parts.ranks)
        if entry.shape != there:
            raise CheckpointError(entry.file, full, f"shape {list(there)}", list(entry.shape))
        if DTYPES.get(entry.dtype) not in dtypes:
            raise CheckpointError(entry.file, full, f"one of {[NAMES[d] for d in dtypes]}", entry.dtype)
        if wanted.axis is not None and shape[wanted.axis] % self.share.ranks:
            raise CheckpointError(entry.file, full, f"a size that {self.share.ranks} ranks can share", list(shape))
        return entry

    def weight(self, name: str, *shape: int) -> torch.Tensor:
        """A dense tensor as float32 of its own memory; FP8 comes multiplied by its scales."""
        return self.dense(name, shape).to(torch.float32)

    def dense(self, name: str, shape: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
        """A dense tensor as it is stored; FP8 as float32, multiplied by its scales on `device`."""
        found = self.raw(name, shape, (*DENSE, FP8), device)
        if found.dtype == FP8:
            scales = self.raw(scale_name(name), scale_shape(shape), (torch.float32, torch.bfloat16), device)
            return fp8_unpack(found, scales)
        return found

    def check_shape(self, name: str, rows: int, columns: int) -> None:
        """CheckpointError unless `name`.weight_shape says that the INT4 matrix is [rows, columns]."""
        full = f"{name}.weight_shape"
        size = self.raw(full, (2,), (torch.int32, torch.int64))
        if size.tolist() != [rows, columns]:
            entry = self.stored.get(full)
            assert entry is not None, "it was just read"
            raise CheckpointError(entry.file, self.prefix + full, str([rows, columns]), size.tolist())

    def packed(self, name: str, rows: int, columns: int) -> PackedWeight:
        """The INT4 matrix [rows, columns] stored under `name`.weight_packed, .weight_scale and .weight_shape."""
        self.check_shape(name, rows, columns)
        words = self.raw(f"{name}.weight_packed", (rows, columns // 8), (torch.int32,))
        return PackedWeight(words, self.weight_scale(name, rows, columns))

    def weight_scale(self, name: str, rows: int, columns: int) -> torch.Tensor:
        return self.weight(f"{name}.weight_scale", rows, columns // GROUP)

    def expert(self, name: str, rows: int, columns: int, int4: bool) -> torch.Tensor:
        """A routed expert's matrix as float32: q * scale, unrounded, or the plain weight."""
        if not int4:
            return self.weight(f"{name}.weight", rows, columns)
        packed = self.packed(name, rows, columns)
        return int4_unpack(packed.words, packed.scales)


def share_bytes(s: Stored, share: Share) -> int:
    """Bytes of the tensors as the share has them."""
    ranks = share.ranks if s.parts == WHOLE else 1
    return sum(entry.bytes // (1 if axis_of(name) is None else ranks) for name, entry in s.entries.items())


class EmbeddingAndHead(NamedTuple):
    """What a drafter borrows from its target, and a hash of exactly that."""

    embedding: torch.Tensor  # [vocabulary, hidden], of the stored type
    head: torch.Tensor  # [vocabulary, hidden], of the stored type
    hash: str


def load_embedding_and_head(folder: Path, device: torch.device | str = "cpu") -> EmbeddingAndHead:
    """Reads two tensors of a target's checkpoint, not the rest; of a converted one, every rank's part."""
    shape, parts = _vocabulary(folder)
    embedding, head = (
        parts[0].dense(name, shape, device)
        if len(parts) == 1
        else torch.cat([p.dense(name, shape, device) for p in parts])
        for name in BORROWED
    )
    return EmbeddingAndHead(embedding, head, _hash(shape, (*embedding.split(BLOCK_ROWS), *head.split(BLOCK_ROWS))))


def embedding_and_head_hash(folder: Path) -> str:
    """The hash alone, in the memory of a few rows."""
    shape, parts = _vocabulary(folder)
    return _hash(
        shape, (block for name in BORROWED for part in parts for block in part.blocks(name, shape, BLOCK_ROWS))
    )


def _vocabulary(folder: Path) -> tuple[tuple[int, int], list[Checkpoint]]:
    """The shape of both, and every rank's part of the folder."""
    fields = Fields.read(folder / "config.json")
    text = fields.inner("text_config") or fields
    manifest = Manifest.read(folder)
    ranks = 1 if manifest is None else manifest.ranks
    shape = text.size("vocab_size"), text.size("hidden_size")
    return shape, [Checkpoint(folder, Share(rank, ranks)) for rank in range(ranks)]


def _hash(shape: tuple[int, int], blocks: Iterable[torch.Tensor]) -> str:
    """Of all rows as float32, whatever they are stored in."""
    digest = hashlib.sha256(f"{shape}".encode())
    for block in blocks:
        digest.update(block.float().cpu().numpy().data)
    return digest.hexdigest()
