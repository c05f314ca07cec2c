"""The tensors of a checkpoint folder and where each lies, from the files' headers; and what is wrong with them."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from hedgerow.model.config import K2Config
from hedgerow.model.fields import Fields
from hedgerow.model.headers import CheckpointError, Entry, of_folder, read_header
from hedgerow.model.manifest import Manifest
from hedgerow.model.tensors import FP8, GROUP, WHOLE, Share, Wanted, tensors

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MASK_FILE = "mask_embedding.safetensors"  # of a drafter, beside what an index or the single file names
NOT_TEXT = ("vision_tower.", "mm_projector.")
NESTED = "language_model."
OTHER_PACKING = (".weight_zero_point", ".weight_g_idx")  # compressed-tensors' names

Complain = Callable[[CheckpointError], None]


def refuse(fault: CheckpointError) -> None:
    """The first fault is the end."""
    raise fault


class Stored(NamedTuple):
    """The text model's tensors of one folder, by their names there; `parts` where a converted file has them divided."""

    folder: Path
    entries: Mapping[str, Entry]
    prefix: str  # of every name
    parts: Share  # what each tensor's entry holds of it; WHOLE in a published folder
    told: frozenset[str] = frozenset()  # what the index names and no file gives: complained of already

    def get(self, name: str) -> Entry | None:
        """By a name without the prefix."""
        return self.entries.get(self.prefix + name)


def stored(folder: Path, share: Share = WHOLE, complain: Complain = refuse) -> Stored:
    """Reads index and headers, no data. `share` names the file of a converted folder."""
    manifest = Manifest.read(folder)
    told: frozenset[str] = frozenset()
    if manifest is not None:
        entries, parts = read_header(manifest.rank_file(folder, share)), share
    else:
        entries, told = published(folder, complain)
        parts = WHOLE
    nested = any(name.startswith(NESTED) for name in (*entries, *told))
    return Stored(folder, entries, NESTED if nested else "", parts, told)


def published(folder: Path, complain: Complain = refuse) -> tuple[dict[str, Entry], frozenset[str]]:
    """Every tensor of the text model by the index, or of the single file; and what of the index is not there."""
    weights = weight_files(folder, complain)
    headers: dict[Path, dict[str, Entry]] = {}
    for file in sorted(set(weights.values())):
        try:
            headers[file] = read_header(file)
        except CheckpointError as fault:
            complain(fault)
    found: dict[str, Entry] = {}
    for name, file in weights.items():
        if file not in headers:
            continue  # complained of
        if name in headers[file]:
            found[name] = headers[file][name]
        else:
            complain(CheckpointError(file, name, "there, as the index says", "missing"))
    for file, header in headers.items():
        for name in header:
            if weights.get(name, file) != file:
                complain(CheckpointError(file, name, f"only in {weights[name].name}, as the index says", "here too"))
    return found, frozenset(weights.keys() - found.keys())


def weight_files(folder: Path, complain: Complain = refuse) -> dict[str, Path]:
    """Name of each tensor of the text model -> its file, from a published folder's index or its single file."""
    if not (folder / INDEX).exists():
        single = of_folder(folder, SINGLE)
        return beside(folder, {name: single for name in read_header(single) if not name.startswith(NOT_TEXT)})
    index = of_folder(folder, INDEX)
    names = Fields.read(index).inner("weight_map")
    if names is None or not all(isinstance(v, str) for v in names.values.values()):
        raise CheckpointError(index, "", "a weight_map of names to files", "absent or malformed")
    paths: dict[str, Path] = {}
    found: dict[str, Path] = {}
    for name, file in names.values.items():
        if name.startswith(NOT_TEXT):
            continue
        try:
            if file not in paths:
                paths[file] = of_folder(folder, file, name, index)
                if not file.endswith(".safetensors"):
                    raise CheckpointError(index, name, "a .safetensors file; others are not opened", file)
            found[name] = paths[file]
        except CheckpointError as fault:
            complain(fault)
    return beside(folder, found)


def beside(folder: Path, found: dict[str, Path]) -> dict[str, Path]:
    """With what a drafter's index does not name. Raises CheckpointError where it is named elsewhere too."""
    if not (folder / MASK_FILE).exists():
        return found
    file = of_folder(folder, MASK_FILE)
    for name in read_header(file):
        if found.setdefault(name, file) != file:
            raise CheckpointError(file, name, f"only in {found[name].name}, as the index says", "here too")
    return found


def faults(s: Stored, c: K2Config, ranks: int = 1) -> Iterator[CheckpointError]:
    """Everything that keeps the folder from being loaded by `ranks` ranks, as far as headers tell."""
    yield from _layers_beyond(s, c)
    yield from _other_packing(s)
    for wanted in tensors(c):
        entry = s.get(wanted.name)
        if wanted.name.endswith("_scale_inv"):
            weight = s.get(wanted.name.removesuffix("_scale_inv"))
            if weight is None or weight.dtype != FP8:
                continue  # a plain matrix has no scales
        full = s.prefix + wanted.name
        if entry is None and full in s.told:
            continue
        if entry is None:
            yield CheckpointError(s.folder, full, f"a tensor of shape {list(wanted.shape)}", "missing")
            continue
        yield from _entry_faults(s, wanted, entry, ranks)


def _layers_beyond(s: Stored, c: K2Config) -> Iterator[CheckpointError]:
    """The first tensor of each layer that the configuration does not have: of half a model comes noise."""
    base, held = f"{s.prefix}model.layers.", c.num_hidden_layers + c.num_nextn_predict_layers
    seen = set[str]()
    for name, entry in s.entries.items():
        number = name.removeprefix(base).split(".", 1)[0] if name.startswith(base) else ""
        if number.isdecimal() and number not in seen and (len(number) > 9 or int(number) >= held):
            seen.add(number)
            limit = f"no layer above {held - 1}, by num_hidden_layers of config.json"
            yield CheckpointError(entry.file, name, limit, f"layer {number}")


def _entry_faults(s: Stored, wanted: Wanted, entry: Entry, ranks: int) -> Iterator[CheckpointError]:
    full, shape = s.prefix + wanted.name, wanted.part(s.parts.ranks)
    if entry.shape != shape:
        why = f", a scale for each group of {GROUP}" if full.endswith(".weight_scale") else ""
        yield CheckpointError(entry.file, full, f"shape {list(shape)}{why}", list(entry.shape))
    elif entry.dtype not in wanted.dtypes:
        yield CheckpointError(entry.file, full, f"one of {list(wanted.dtypes)}", entry.dtype)
    elif not divides(wanted, ranks, entry.dtype):
        axis = "rows" if wanted.axis == 0 else "columns"
        unit = f", each a multiple of {wanted.unit}" if wanted.unit > 1 else ""
        yield CheckpointError(entry.file, full, f"{axis} that {ranks} ranks can share{unit}", list(wanted.shape))


def _other_packing(s: Stored) -> Iterator[CheckpointError]:
    """What would have to be read to know the weights, and has no place in symmetric groups of neighbours."""
    for name, entry in s.entries.items():
        if name.endswith(OTHER_PACKING):
            limit = "no such tensor: INT4 groups are symmetric here, and of columns side by side"
            yield CheckpointError(entry.file, name, limit, list(entry.shape))


def size_faults(s: Stored, c: K2Config) -> Iterator[CheckpointError]:
    """INT4 matrices whose `weight_shape` is not the size that config.json gives them: a few bytes each are read.

    What `faults` tells of is passed over.
    """
    with contextlib.ExitStack() as files:
        opened, size = dict[Path, int](), (0, 0)
        for wanted in tensors(c):
            if wanted.name.endswith(".weight_packed"):
                size = (wanted.shape[0], wanted.shape[1] * 8)
            entry = s.get(wanted.name) if wanted.name.endswith(".weight_shape") else None
            if entry is None or entry.shape != wanted.shape or entry.dtype not in wanted.dtypes:
                continue
            try:
                if entry.file not in opened:
                    opened[entry.file] = files.enter_context(entry.file.open("rb")).fileno()
                data = os.pread(opened[entry.file], entry.bytes, entry.start)
            except OSError as error:
                yield CheckpointError(entry.file, "", "a file that can be read", error.strerror)
                return
            said = struct.unpack("<2i" if entry.dtype == "I32" else "<2q", data.ljust(entry.bytes, b"\0"))
            if said != size:
                yield CheckpointError(entry.file, s.prefix + wanted.name, str(list(size)), list(said))


def divides(wanted: Wanted, ranks: int, dtype: str) -> bool:
    """Whether each rank's part is of whole units: heads, groups or blocks."""
    if wanted.axis is None or ranks == 1:
        return True
    return wanted.shape[wanted.axis] % (wanted.unit * ranks) == 0


def parameters(wanted: Wanted, dtype: str) -> int:
    """Weights that a tensor holds: eight to a word; scales and shapes are none."""
    size = 1
    for length in wanted.shape:
        size *= length
    if wanted.name.endswith(("_scale", "_shape", "_scale_inv")):
        return 0
    return size * 8 if dtype == "I32" else size
