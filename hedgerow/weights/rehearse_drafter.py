"""`hedgerow rehearse --drafter`: a drafter of the layout published for Kimi beside a made-up target, random weights.

Fields and sizes are those of z-lab's and nvidia's drafters as they are public: six layers of which the last sees
everything, block 8, six of the target's layers, the mask [UNK]; "dflash2" adds the convolutions and the selector of the
second kind. At the true sizes it has 6.48 GiB, as theirs have. What it drafts is noise, and no token depends on it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Literal

from hedgerow.errors import InvalidRequest
from hedgerow.model.draft_config import DraftConfig
from hedgerow.model.draft_tensors import SELECTOR, tensors
from hedgerow.model.folder import SINGLE
from hedgerow.model.tensors import DENSE, Wanted
from hedgerow.weights.published import SPECIALS, TRAITS, Member, Sizes, text_config
from hedgerow.weights.rehearse import Pool, nothing_left, stored_as, write_json
from hedgerow.weights.writing import write_file

DraftKind = Literal["dflash", "dflash2"]
LAYERS, BLOCK, WINDOW, FEATURES, UNKNOWN = 6, 8, 2048, 6, 254  # the last: of the mask among the special tokens


def config(member: Member, s: Sizes, kind: DraftKind) -> dict[str, Any]:
    """config.json."""
    t, target = TRAITS[member], text_config(s, TRAITS[member])
    inner: dict[str, Any] = {
        "block_size": BLOCK, "mask_token_id": s.vocab - SPECIALS + UNKNOWN, "num_target_layers": s.layers,
        "target_layer_ids": layer_ids(s.layers),
    }  # fmt: skip
    if kind == "dflash2":
        inner |= {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
    return {
        "architectures": ["DFlashDraftModel" if kind == "dflash" else "DFlash2DraftModel"], "attention_bias": False,
        "attention_dropout": 0.0, "dflash_config": inner, "dtype": "bfloat16", "head_dim": s.nope, "hidden_act": "silu",
        "hidden_size": s.hidden, "intermediate_size": s.dense_width,
        "layer_types": ["sliding_attention"] * (LAYERS - 1) + ["full_attention"],
        "max_position_embeddings": t.positions, "model_type": "qwen3", "num_attention_heads": s.heads,
        "num_hidden_layers": LAYERS, "num_key_value_heads": max(1, s.heads // 8), "rms_norm_eps": 1e-5,
        "rope_scaling": target["rope_scaling"], "rope_theta": target["rope_theta"], "sliding_window": WINDOW,
        "tie_word_embeddings": False, "use_sliding_window": True, "vocab_size": s.vocab,
    }  # fmt: skip


def layer_ids(depth: int) -> list[int]:
    """By the package's own rule, which gives 1, 12, 24, 35, 47, 58 of 61; of a target that is cut short what it has."""
    ids = (round(1 + i * (depth - 4) / (FEATURES - 1)) for i in range(FEATURES))
    return sorted({min(max(layer, 0), depth - 1) for layer in ids})


def wanted(c: DraftConfig) -> list[Wanted]:
    """Its tensors; the codebooks as they are published, without `.weight`."""
    found = list(tensors(c))
    if c.selector is not None:
        rank = c.selector.rank
        shapes = (c.vocab_size, rank), (c.vocab_size, rank), (rank, c.hidden_size)
        found += [
            Wanted(f"candidate_selector.{n}", shape, DENSE, None) for n, shape in zip(SELECTOR, shapes, strict=True)
        ]
    return found


def check_beside(folder: Path) -> Path:
    """Where the drafter of a target in `folder` lies, by the name that `hedgerow up` looks for. Raises InvalidRequest
    where something is there already.
    """
    beside = folder.with_name(f"{folder.name}-dflash")
    if beside.exists() and (not beside.is_dir() or any(beside.iterdir())):
        raise InvalidRequest("FOLDER", str(beside), "a new or an empty folder, for the drafter")
    return beside


def write_drafter(folder: Path, member: Member, s: Sizes, kind: DraftKind, seed: int = 0) -> None:
    """The whole folder. Raises InvalidRequest where the disk has no room."""
    folder.mkdir(parents=True, exist_ok=True)
    with nothing_left(folder):
        write_json(folder / "config.json", config(member, s, kind))
        every = wanted(DraftConfig.from_folder(folder))
        shapes = [stored_as(one, "") for one in every]
        needed, free = sum(shape.bytes for shape in shapes), shutil.disk_usage(folder).free
        if needed > free:
            limit = f"a disk with {needed / 1e9:.1f} GB for the drafter's weights"
            raise InvalidRequest("FOLDER", f"{free / 1e9:.1f} GB free", limit)
    pool = Pool(s, seed)
    write_file(folder / SINGLE, shapes, (piece for one in every for piece in pool.pieces(one, one.dtypes[0])))
