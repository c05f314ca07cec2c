"""The peers that our models are compared with: Hugging Face's DeepseekV3, compressed-tensors and `dflash`.

The target's peer runs in float32 with experts as q * scale, unpacked by compressed-tensors. Its norms of the latents
use epsilon 1e-6 whatever the config says, hence PEER_LATENT_EPS. `dflash` is imported by its module: the package's own
import pulls in its benchmark's needs only by name, so nothing else of it has to be installed.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import load_file

from hedgerow.model.batch import SequenceRows
from hedgerow.model.dflash import DFlashModel

with warnings.catch_warnings():  # the peers' own imports are not ours to fix
    warnings.simplefilter("ignore")
    from dflash.model import DFlashDraftModel, _crop_to, _make_cache
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3Config

PEER_LATENT_EPS = 1e-6
TOLERANCE = 1e-4
INT4 = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy=QuantizationStrategy.GROUP, group_size=32)


def plain_name(name: str) -> str:
    return name.removeprefix("language_model.")


def checkpoint_tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return {plain_name(name): tensor for name, tensor in found.items()}


def peer_expert(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """compressed-tensors' own unpacking and product, float32."""
    size = torch.Size(tensors[name + ".weight_shape"].tolist())
    codes = unpack_from_int32(tensors[name + ".weight_packed"], 4, size)
    product: torch.Tensor = dequantize(codes.float(), tensors[name + ".weight_scale"].float(), args=INT4)
    return product


def peer_state(tensors: dict[str, torch.Tensor], experts: int) -> dict[str, torch.Tensor]:
    """Checkpoint tensors under the peer's names: a layer's experts are one tensor there, gate first."""
    state = {name: t.float() for name, t in tensors.items() if ".experts." not in name}
    for base in {name.split(".experts.")[0] for name in tensors if ".mlp.experts." in name}:
        every = [f"{base}.experts.{e}." for e in range(experts)]
        pairs = [torch.cat([peer_expert(tensors, n + "gate_proj"), peer_expert(tensors, n + "up_proj")]) for n in every]
        state[base + ".experts.gate_up_proj"] = torch.stack(pairs)
        state[base + ".experts.down_proj"] = torch.stack([peer_expert(tensors, n + "down_proj") for n in every])
    return state


def peer_model(folder: Path, experts: int) -> Any:
    config = json.loads((folder / "config.json").read_text())
    config = dict(config.get("text_config", config))
    config.pop("quantization_config")
    config.pop("model_type")
    peer_config = DeepseekV3Config(**config, num_mtp_layers=0)
    peer_config._attn_implementation = "eager"
    peer: Any = DeepseekV3ForCausalLM(peer_config)
    peer = peer.eval().float()
    peer.load_state_dict(peer_state(checkpoint_tensors(folder), experts), strict=True)
    return peer


def chain(tokens: list[int], start: int, end: int, pages: Sequence[int]) -> SequenceRows:
    rows = end - start
    return SequenceRows(start, pages, tokens[start:end], range(-1, rows - 1), range(rows))


class DraftPeer:
    """The package's model with its own cache, for one sequence."""

    def __init__(self, folder: Path, block: int) -> None:
        config = Qwen3Config(**json.loads((folder / "config.json").read_text()))
        config._attn_implementation = "sdpa"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model = DFlashDraftModel(config).eval().float()
        tensors = {name: t.float() for name, t in load_file(folder / "model.safetensors").items()}
        self.model.load_state_dict(tensors, strict=True)
        self.cache, self.block = _make_cache(config), block

    @torch.no_grad()
    def round(self, features: torch.Tensor, embedded: torch.Tensor, anchor_position: int) -> torch.Tensor:
        """Hidden states of rows 1.. of the block whose anchor stands right after `features`."""
        start = anchor_position - len(features)
        hidden: torch.Tensor = self.model(
            target_hidden=features[None],
            noise_embedding=embedded[None],
            position_ids=torch.arange(start, anchor_position + self.block)[None],
            past_key_values=self.cache,
            use_cache=True,
        )
        _crop_to(self.cache, anchor_position)
        return hidden[0, 1:]


def embed_block(model: DFlashModel, anchor: int) -> torch.Tensor:
    tokens = torch.tensor([anchor] + [model.config.mask_token_id] * (model.block_size - 1))
    return model.embedding[tokens]
