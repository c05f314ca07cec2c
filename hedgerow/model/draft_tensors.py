"""The tensors of a DFlash drafter by name, what is wrong with a folder's, and what the drafter takes of its target.

Names and shapes are those of the published checkpoints and of the package `dflash`; all sizes are in config.json. A
tensor that nothing here reads would make the drafter another one, and show in its acceptance alone: it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from hedgerow.model.convolution import stored_halves
from hedgerow.model.draft_config import DraftConfig, SelectorSize, selector_size
from hedgerow.model.fields import ConfigError, Fields
from hedgerow.model.folder import MASK_FILE, Stored, refuse, stored
from hedgerow.model.headers import CheckpointError
from hedgerow.model.loader import Checkpoint, EmbeddingAndHead, load_embedding_and_head
from hedgerow.model.tensors import DENSE, FP8, Wanted, matrix, scale_name, vector

MASK = "mask_embedding"  # the masks' own row, where the target's is not trained
MASK_PICKLE = "mask_embedding.pt"  # as MiMo's drafters are published with it
COMPUTED = ".rotary_emb.inv_freq"  # saved by some, and given by the configuration
SELECTOR = ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")


def tensors(c: DraftConfig) -> Iterator[Wanted]:
    """All that are read."""
    hidden, d = c.hidden_size, c.head_dim
    yield matrix("fc", hidden, c.feature_width)
    yield vector("hidden_norm", hidden)
    yield vector("norm", hidden)
    for number in range(c.num_hidden_layers):
        base, attention = f"layers.{number}.", f"layers.{number}.self_attn."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield vector(base + name, hidden)
        for name in ("q_norm", "k_norm"):
            yield vector(attention + name, d)
        yield matrix(attention + "q_proj", c.num_attention_heads * d, hidden)
        for name in ("k_proj", "v_proj"):
            yield matrix(attention + name, c.num_key_value_heads * d, hidden)
        yield matrix(attention + "o_proj", hidden, c.num_attention_heads * d)
        for name in ("gate_proj", "up_proj"):
            yield matrix(f"{base}mlp.{name}", c.intermediate_size, hidden)
        yield matrix(f"{base}mlp.down_proj", hidden, c.intermediate_size)
        for half in stored_halves(base, c):
            yield Wanted(half.base, half.base_shape, DENSE, None)
            yield matrix(half.projection, *half.projection_shape)


def selector_tensors(s: Stored, c: DraftConfig, size: SelectorSize) -> Iterator[Wanted]:
    """The codebooks are published without, and saved by others with, `.weight`."""
    for name in SELECTOR:
        shape = (size.rank, c.hidden_size) if name == SELECTOR[-1] else (c.vocab_size, size.rank)
        full = f"candidate_selector.{name}"
        yield Wanted(full if s.get(full) is not None else f"{full}.weight", shape, DENSE, None)


def check_tensors(folder: Path, c: DraftConfig) -> None:
    """CheckpointError for the first thing that is wrong with a drafter's tensors, as far as headers tell."""
    for fault in faults(stored(folder), c):
        refuse(fault)


def faults(s: Stored, c: DraftConfig) -> Iterator[CheckpointError]:
    """Everything that is wrong with them."""
    wanted = list(tensors(c))
    if c.selector is not None:
        wanted += selector_tensors(s, c, c.selector)
    yield from differences(s, wanted)
    known = {one.name for one in wanted} | {scale_name(one.name) for one in wanted} | {MASK}
    for name, entry in s.entries.items():
        if name not in known and not name.endswith(COMPUTED):
            yield CheckpointError(entry.file, name, "no tensor that there is no code for", list(entry.shape))
    own, shapes = s.get(MASK), ((c.hidden_size,), (1, c.hidden_size))
    if own is None and (s.folder / MASK_PICKLE).exists():
        needed = f"the tensor {MASK} [{c.hidden_size}] in {MASK_FILE}: a pickle is not opened"
        yield CheckpointError(s.folder / MASK_PICKLE, "", needed, "no such tensor in the folder")
    elif own is not None and (own.shape not in shapes or own.dtype not in DENSE):
        yield CheckpointError(own.file, MASK, f"shape {list(shapes[0])} of {list(DENSE)}", [own.dtype, *own.shape])


def selector_faults(beside: Path, c: DraftConfig) -> Iterator[CheckpointError]:
    """Of the selector in a folder of its own. Raises ConfigError."""
    f = Fields.read(beside / "config.json")
    size = selector_size(Fields(f.file, {**f.values, "vocab_size": c.vocab_size}), f)
    if size is not None:
        s = stored(beside)
        yield from differences(s, list(selector_tensors(s, c, size)))


def differences(s: Stored, wanted: list[Wanted]) -> Iterator[CheckpointError]:
    """What is missing, or of another shape or type. FP8 has scales beside it."""
    for one in wanted:
        entry = s.get(one.name)
        if entry is None:
            yield CheckpointError(s.folder, one.name, f"a tensor of shape {list(one.shape)}", "missing")
        elif entry.shape != one.shape:
            yield CheckpointError(entry.file, one.name, f"shape {list(one.shape)}", list(entry.shape))
        elif entry.dtype not in (*DENSE, FP8):
            yield CheckpointError(entry.file, one.name, f"one of {[*DENSE, FP8]}", entry.dtype)


def borrow(
    c: DraftConfig, checkpoint: Checkpoint, target_folder: Path, device: torch.device | str = "cpu"
) -> EmbeddingAndHead:
    """The target's embedding and head, with the masks' row as the drafter's own checkpoint has it, if it does; the hash
    is the target's. Raises ConfigError where they are not of the drafter's size, CheckpointError.
    """
    borrowed = load_embedding_and_head(target_folder, device)
    if borrowed.embedding.shape != (c.vocab_size, c.hidden_size):
        limit = f"the target's vocabulary and hidden size, {tuple(borrowed.embedding.shape)}"
        file = checkpoint.folder / "config.json"
        raise ConfigError(file, "vocab_size, hidden_size", (c.vocab_size, c.hidden_size), limit)
    own = checkpoint.stored.get(MASK)
    if own is not None:
        borrowed.embedding[c.mask_token_id] = checkpoint.weight(MASK, *own.shape).view(-1).to(device)
    return borrowed
