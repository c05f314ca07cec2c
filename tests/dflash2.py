"""A drafter of the second kind on disk: a made-up DFlash with convolutions and a candidate selector."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.tiny import TinyDrafter, TinyTarget, matrix, write_drafter, write_json

SLIDING, FULL = "sliding_attention", "full_attention"
DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 24, "selector_top_k": 16}
# Name -> sizes, causality of all layers, sizes of the convolution and the selector
SHAPES: dict[str, tuple[TinyDrafter, bool | None, dict[str, int]]] = {
    "all sliding, both ways": (TinyDrafter(layers=3, window=24, layer_types=(SLIDING,) * 3), False, DFLASH2),
    "causal in sliding layers": (TinyDrafter(window=20), None, DFLASH2),
    "three taps, groups of 8": (
        TinyDrafter(layers=1, layer_types=(FULL,), block=5),
        None,
        {**DFLASH2, "conv_kernel_size": 3, "conv_group_size": 8},
    ),
}  # fmt: skip


def write_dflash2(
    folder: Path,
    target: TinyTarget,
    shape: TinyDrafter,
    causal: bool | None,
    sizes: dict[str, int],
    dotted: bool = False,
) -> None:
    """`dotted`: codebooks saved as `.weight`, as a module saves them; published files are without."""
    write_drafter(folder, target, shape)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["DFlash2DraftModel"]
    config["dflash_config"] |= sizes
    if causal is not None:
        config["is_causal"] = causal
    write_json(folder / "config.json", config)
    g, tensors = torch.Generator().manual_seed(5), load_file(folder / "model.safetensors")
    taps, group, rank = (sizes[f"{name}"] for name in ("conv_kernel_size", "conv_group_size", "selector_rank"))
    for layer in range(shape.layers):
        for half in ("attention", "mlp"):
            base = f"layers.{layer}.{half}_conv."
            tensors[base + "base_kernel"] = torch.randn(2, taps, target.hidden, generator=g).bfloat16() * 0.5
            tensors[base + "kernel_projection.weight"] = matrix(g, 2 * taps * (target.hidden // group), target.hidden)
    end = ".weight" if dotted else ""
    for name in ("predecessor", "successor"):
        tensors[f"candidate_selector.{name}_codebook{end}"] = torch.randn(target.vocab, rank, generator=g).bfloat16()
    tensors["candidate_selector.hidden_projection.weight"] = matrix(g, rank, target.hidden)
    save_file(tensors, folder / "model.safetensors")
