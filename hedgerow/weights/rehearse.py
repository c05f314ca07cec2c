"""`hedgerow rehearse`: a folder with the exact names, types and shards of a published checkpoint, and random weights.

    write(Path("kimi"), "k2.6", MINI)         # all 61 layers, small widths: served like the real one, says nothing
    write(Path("kimi"), "k2.6", ONE_LAYER)    # one MoE layer at true widths

Weights are cut out of a pool of random numbers at random places, so that files are written as fast as the disk takes
them. A command rather than a script of models/: images have no checkout, and a rehearsal is where the image runs.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from hedgerow.errors import InvalidRequest
from hedgerow.model.config import K2Config
from hedgerow.model.folder import INDEX
from hedgerow.model.tensors import FP8, GROUP, Wanted, last, layer, matrix
from hedgerow.weights.published import TRAITS, Member, Sizes, config, projector, vision
from hedgerow.weights.vocabulary import write_vocabulary
from hedgerow.weights.writing import Shape, write_file

POOL = 1 << 21  # numbers of each kind
CODE = 4.6  # root mean square of a uniform INT4 code


class Pool:
    """Random numbers of every kind that a checkpoint has; `seed` decides them and what is cut where.

    `short_scales`: INT4 scales of five significant bits, whose products with any code are bfloat16 numbers. A peer that
    rounds the product then has the weights that we have.
    """

    def __init__(self, s: Sizes, seed: int, short_scales: bool = False) -> None:
        g = torch.Generator().manual_seed(seed)
        self.normal = torch.randn(POOL, generator=g)
        self.codes = torch.randint(-(2**31), 2**31, (POOL,), generator=g).int()
        self.spread = torch.rand(POOL, generator=g) + 0.5
        if short_scales:
            self.spread = (self.spread * 16).round() / 16
        self.expert = s.width, s.hidden  # rows and columns of gate and up
        self.depth = (2 * s.layers) ** -0.5  # of what a layer adds: 61 layers then round as a few do
        self._at, self._made = random.Random(seed), dict[tuple[str, float], torch.Tensor]()

    def pieces(self, wanted: Wanted, dtype: str) -> Iterator[torch.Tensor]:
        """The tensor's elements in order."""
        if wanted.name.endswith(".weight_shape"):
            down = ".down_proj." in wanted.name
            yield torch.tensor(self.expert[::-1] if down else self.expert, dtype=torch.int32)
            return
        source, left = self.source(wanted, dtype), math.prod(wanted.shape)
        while left:
            count = min(left, POOL // 2)
            start = self._at.randrange(POOL - count)
            yield source[start : start + count]
            left -= count

    def source(self, wanted: Wanted, dtype: str) -> torch.Tensor:
        """The pool for a tensor: matrices keep the size of what goes through them, norms are near one."""
        name, columns = wanted.name, wanted.shape[-1]
        depth = self.depth if ".o_proj." in name or ".down_proj." in name else 1.0
        if dtype == "I32":
            return self.codes
        if name.endswith("norm.weight"):
            return self.made("norm", 0.1, dtype)
        if name.endswith("e_score_correction_bias"):
            return self.made("normal", 0.3, dtype)
        if name.endswith(".weight_scale"):
            # a power of two near what keeps the size: the significant bits are the pool's
            return self.made("spread", power_of_two(depth / (CODE * math.sqrt(columns * GROUP))), dtype)
        if name.endswith("_scale_inv"):
            return self.made("spread", depth / math.sqrt(columns * 128), dtype)
        plain = dtype == FP8 or name == "model.embed_tokens.weight"
        return self.made("normal", 1.0 if plain else depth / math.sqrt(columns), dtype)

    def made(self, kind: str, gain: float, dtype: str) -> torch.Tensor:
        """One kind of numbers times `gain`, kept."""
        if (kind + dtype, gain) not in self._made:
            base = self.spread if kind == "spread" else self.normal
            values = base * gain + (kind == "norm")
            types = {"BF16": torch.bfloat16, "F32": torch.float32, FP8: torch.float8_e4m3fn}
            self._made[kind + dtype, gain] = values.to(types[dtype])
        return self._made[kind + dtype, gain]


def power_of_two(value: float) -> float:
    return float(2.0 ** round(math.log2(value)))


def write(
    folder: Path, member: Member, s: Sizes, seed: int = 0, tokenizer: Path | None = None, short_scales: bool = False
) -> None:
    """The whole folder; the index, without which it is none, comes last. `tokenizer`: a folder whose files to take.

    Raises InvalidRequest for a folder that holds something, and where the disk has no room.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidRequest("FOLDER", str(folder), "a new or an empty folder")
    folder.mkdir(parents=True, exist_ok=True)
    with nothing_left(folder):
        write_small_files(folder, member, s, tokenizer)
        shards = list(in_shards(K2Config.from_folder(folder), member, s))
        total = sum(shape.bytes for shard in shards for _, shape in shard)
        free = shutil.disk_usage(folder).free
        if total > free:
            limit = f"a disk with {total / 1e9:.1f} GB for the weights"
            raise InvalidRequest("FOLDER", f"{free / 1e9:.1f} GB free", limit)
    pool, weight_map = Pool(s, seed, short_scales), dict[str, str]()
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        shapes = [shape for _, shape in shard]
        pieces = (piece for wanted, shape in shard for piece in pool.pieces(wanted, shape.dtype))
        write_file(folder / name, shapes, pieces)
        weight_map |= dict.fromkeys((shape.name for shape in shapes), name)
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_small_files(folder: Path, member: Member, s: Sizes, tokenizer: Path | None) -> None:
    """Configuration and vocabulary."""
    write_json(folder / "config.json", config(member, s))
    first = s.vocab - 256
    stop = [first + 2, first + 1] if TRAITS[member].nested else first + 2
    write_json(folder / "generation_config.json", {"eos_token_id": stop, "max_length": TRAITS[member].positions})
    write_vocabulary(folder, s.vocab, tokenizer, thinks=not TRAITS[member].fp8)


@contextlib.contextmanager
def nothing_left(folder: Path) -> Iterator[None]:
    """After a refusal the folder is as empty as it was, so that the same command may be asked again."""
    try:
        yield
    except (InvalidRequest, OSError):
        for path in folder.iterdir():
            path.unlink()
        raise


def in_shards(c: K2Config, member: Member, s: Sizes) -> Iterator[list[tuple[Wanted, Shape]]]:
    """What lies in each file: a layer, then embedding, norm and head, then projector and vision tower."""
    prefix = "language_model." if TRAITS[member].nested else ""
    for number in range(c.num_hidden_layers):
        yield [(w, stored_as(w, prefix)) for w in layer(c, number)]
    ends = [matrix("model.embed_tokens", c.vocab_size, c.hidden_size), *last(c)]
    yield [(w, stored_as(w, prefix)) for w in ends]
    for images in (projector(s), vision(s)) if TRAITS[member].nested else ():
        yield [(Wanted(shape.name, shape.shape, (), None), shape) for shape in images]


def stored_as(wanted: Wanted, prefix: str) -> Shape:
    return Shape(prefix + wanted.name, wanted.dtypes[0], wanted.shape)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
