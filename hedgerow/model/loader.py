"""Checkpoint folders: safetensors files behind one lookup by name, and the hash that stands for them.

A tensor is returned as float32 except where a dtype is asked for; every complaint names file, tensor, expected and
actual.
Format: huggingface/safetensors (8 bytes of header length, JSON header, data).
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from hedgerow.errors import InvalidRequest
from hedgerow.model.fields import Fields
from kernels.int4 import int4_unpack

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
NOT_TEXT = ("vision_tower.", "mm_projector.")
GROUP = 32  # weights that share a scale


class CheckpointError(InvalidRequest):
    """`tensor` of `file` is not what the config asks for; `tensor` is empty where the file itself is at fault."""

    def __init__(self, file: Path, tensor: str, expected: str, actual: object) -> None:
        super().__init__(f"{file}: {tensor}" if tensor else str(file), actual, expected)
        self.file, self.tensor, self.expected, self.actual = file, tensor, expected, actual


class PackedWeight(NamedTuple):
    """An INT4 matrix as stored: value[n, k] = (nibble - 8) * scale[n, k // 32]."""

    words: torch.Tensor  # [N, K / 8] int32
    scales: torch.Tensor  # [N, K / 32] float32, of bfloat16 values


class Checkpoint:
    """The tensors of one folder. Files stay mapped as long as this lives."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = weight_files(folder)
        for path in set(self._files.values()):
            check_whole(path)
        self._open = {path: opened(path) for path in set(self._files.values())}
        nested = any(name.startswith("language_model.") for name in self._files)
        self.prefix = "language_model." if nested else ""

    def __contains__(self, name: str) -> bool:
        return self.prefix + name in self._files

    def raw(self, name: str, shape: Sequence[int], dtypes: Sequence[torch.dtype]) -> torch.Tensor:
        """The stored tensor; `name` without the family's prefix."""
        full = self.prefix + name
        file = self._files.get(full)
        if file is None:
            raise CheckpointError(self.folder, full, f"a tensor of shape {list(shape)}", "missing")
        try:
            tensor: torch.Tensor = self._open[file].get_tensor(full)
        except SafetensorError as error:
            raise CheckpointError(file, full, "readable, as the index says", str(error)) from None
        if list(tensor.shape) != list(shape):
            raise CheckpointError(file, full, f"shape {list(shape)}", list(tensor.shape))
        if tensor.dtype not in dtypes:
            raise CheckpointError(file, full, f"one of {[str(d) for d in dtypes]}", str(tensor.dtype))
        return tensor

    def weight(self, name: str, *shape: int) -> torch.Tensor:
        """A dense tensor as float32 of its own memory."""
        stored = self.raw(name, shape, (torch.bfloat16, torch.float16, torch.float32))
        return stored.to(torch.float32, copy=True)

    def packed(self, name: str, rows: int, columns: int) -> PackedWeight:
        """The INT4 matrix [rows, columns] stored under `name`.weight_packed, .weight_scale and .weight_shape."""
        size = self.raw(f"{name}.weight_shape", (2,), (torch.int32, torch.int64))
        if size.tolist() != [rows, columns]:
            full = f"{self.prefix}{name}.weight_shape"
            raise CheckpointError(self._files[full], full, str([rows, columns]), size.tolist())
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


def weight_files(folder: Path) -> dict[str, Path]:
    """Name of each tensor of the text model -> its file, from the index or the single file."""
    index = folder / INDEX
    if index.exists():
        names = Fields.read(index).inner("weight_map")
        if names is None or not all(isinstance(v, str) for v in names.values.values()):
            raise CheckpointError(index, "", "a weight_map of names to files", "absent or malformed")
        for name, file in names.values.items():
            if Path(file).name != file:
                raise CheckpointError(index, name, "a file of this folder", file)
        return {name: folder / file for name, file in names.values.items() if not name.startswith(NOT_TEXT)}
    single = folder / SINGLE
    return dict.fromkeys(read_header(single), single)


def read_header(path: Path) -> dict[str, Any]:
    """The JSON header of a safetensors file, without its metadata."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 0 < length < 1 << 30:
                raise CheckpointError(path, "", "a safetensors header", f"{path.stat().st_size} bytes")
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise CheckpointError(path, "", "the file", "missing") from None
    except OSError as error:
        raise CheckpointError(path, "", "a file that can be read", error.strerror) from None
    except ValueError as error:
        raise CheckpointError(path, "", "a safetensors header", str(error)) from None
    if not isinstance(header, dict):
        raise CheckpointError(path, "", "a safetensors header", type(header).__name__)
    header.pop("__metadata__", None)
    return header


def opened(path: Path) -> Any:
    """The file, mapped. Raises CheckpointError where its header contradicts itself."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(path, "", "a safetensors file", str(error)) from None


def check_whole(path: Path) -> None:
    """Raises CheckpointError where the file is shorter or longer than its header says."""
    header = read_header(path)
    with path.open("rb") as file:
        start = 8 + int(struct.unpack("<Q", file.read(8))[0])
    try:
        expected = start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (KeyError, IndexError, TypeError):
        raise CheckpointError(path, "", "a safetensors header", "an entry without data_offsets") from None
    actual = path.stat().st_size
    if actual != expected:
        raise CheckpointError(path, "", f"{expected} bytes", f"{actual} bytes")


def checkpoint_hash(folder: Path) -> str:
    """SHA-256 over config.json and the weight files, each with its name and length: equal only for equal bits."""
    digest = hashlib.sha256()
    for path in [folder / "config.json", *sorted(set(weight_files(folder).values()))]:
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while chunk := file.read(1 << 22):
                digest.update(chunk)
    return digest.hexdigest()


class EmbeddingAndHead(NamedTuple):
    """What a drafter borrows from its target, and a hash of exactly that."""

    embedding: torch.Tensor  # [vocabulary, hidden] float32
    head: torch.Tensor  # [vocabulary, hidden] float32
    hash: str


def load_embedding_and_head(folder: Path) -> EmbeddingAndHead:
    """Reads two tensors of a target's checkpoint, not the rest."""
    fields = Fields.read(folder / "config.json")
    text = fields.inner("text_config") or fields
    shape = text.size("vocab_size"), text.size("hidden_size")
    checkpoint = Checkpoint(folder)
    embedding = checkpoint.weight("model.embed_tokens.weight", *shape)
    head = checkpoint.weight("lm_head.weight", *shape)
    digest = hashlib.sha256(f"{shape}".encode())
    for tensor in (embedding, head):
        digest.update(tensor.numpy().tobytes())
    return EmbeddingAndHead(embedding, head, digest.hexdigest())
