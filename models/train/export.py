"""Write and read the two checkpoints: genuine K2.6 layout for the target, DFlash layout for the drafter."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.train.configs import drafter_config, drafter_shape, generation_config, target_config, target_shape
from models.train.drafter import Drafter
from models.train.quant import pack, unpack
from models.train.target import Block, DenseMlp, Moe, Target

PREFIX = "language_model."
SHARD_BYTES = 15_500_000
ATTENTION = ["q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"]
PAIR = ("gate_proj", "up_proj")
LAYER = ["q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"]


def bf16(t: Tensor) -> Tensor:
    return t.detach().to("cpu", torch.bfloat16).contiguous()


def expert_tensors(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    words, scale, shape = pack(weight.detach().cpu())
    yield f"{name}.weight_packed", words
    yield f"{name}.weight_scale", scale
    yield f"{name}.weight_shape", shape


def mlp_tensors(prefix: str, mlp: DenseMlp | Moe) -> Iterator[tuple[str, Tensor]]:
    if isinstance(mlp, DenseMlp):
        for i, name in enumerate(PAIR):
            yield f"{prefix}{name}.weight", bf16(mlp.gate_up[i])
        yield f"{prefix}down_proj.weight", bf16(mlp.down)
        return
    yield f"{prefix}gate.weight", bf16(mlp.router)
    yield f"{prefix}gate.e_score_correction_bias", mlp.bias.detach().cpu().float().clone()
    for e in range(mlp.gate_up.shape[0]):
        for i, name in enumerate(PAIR):
            yield from expert_tensors(f"{prefix}experts.{e}.{name}", mlp.gate_up[e, i])
        yield from expert_tensors(f"{prefix}experts.{e}.down_proj", mlp.down[e])
    for i, name in enumerate(PAIR):
        yield f"{prefix}shared_experts.{name}.weight", bf16(mlp.shared_gate_up[i])
    yield f"{prefix}shared_experts.down_proj.weight", bf16(mlp.shared_down)


def block_tensors(prefix: str, block: Block) -> Iterator[tuple[str, Tensor]]:
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{prefix}{name}.weight", bf16(getattr(block, name))
    for name in ATTENTION:
        yield f"{prefix}self_attn.{name}.weight", bf16(getattr(block.attention, name))
    yield from mlp_tensors(f"{prefix}mlp.", block.mlp)


def target_tensors(model: Target) -> Iterator[tuple[str, Tensor]]:
    """Every tensor under its K2.6 name, in the order of the forward pass."""
    yield f"{PREFIX}model.embed_tokens.weight", bf16(model.embed)
    for i, block in enumerate(model.layers()):
        yield from block_tensors(f"{PREFIX}model.layers.{i}.", block)
    yield f"{PREFIX}model.norm.weight", bf16(model.norm)
    yield f"{PREFIX}lm_head.weight", bf16(model.head)


def shards(tensors: Iterator[tuple[str, Tensor]]) -> list[dict[str, Tensor]]:
    out: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors:
        size += tensor.nbytes
        if size > SHARD_BYTES:
            out.append({})
            size = tensor.nbytes
        out[-1][name] = tensor
    return out


def save(tensors: dict[str, Tensor], path: Path) -> None:
    """Readable by others: safetensors writes files for its owner only."""
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_target(model: Target, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    parts = shards(target_tensors(model))
    weight_map: dict[str, str] = {}
    total = 0
    for i, part in enumerate(parts):
        name = f"model-{i + 1:05d}-of-{len(parts):05d}.safetensors"
        save(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
        total += sum(t.nbytes for t in part.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    write_json(folder / "config.json", target_config(model.s))
    write_json(folder / "generation_config.json", generation_config(model.s))


@torch.no_grad()
def read_mlp(tensors: dict[str, Tensor], prefix: str, mlp: DenseMlp | Moe) -> None:
    def linear(name: str) -> Tensor:
        return tensors[f"{prefix}{name}.weight"].float()

    def expert(name: str) -> Tensor:
        base = f"{prefix}experts.{name}."
        return unpack(tensors[base + "weight_packed"], tensors[base + "weight_scale"])

    if isinstance(mlp, DenseMlp):
        mlp.gate_up.copy_(torch.stack([linear(n) for n in PAIR]))
        mlp.down.copy_(linear("down_proj"))
        return
    mlp.router.copy_(linear("gate"))
    mlp.bias.copy_(tensors[f"{prefix}gate.e_score_correction_bias"])
    for e in range(mlp.gate_up.shape[0]):
        mlp.gate_up[e].copy_(torch.stack([expert(f"{e}.{n}") for n in PAIR]))
        mlp.down[e].copy_(expert(f"{e}.down_proj"))
    mlp.shared_gate_up.copy_(torch.stack([linear(f"shared_experts.{n}") for n in PAIR]))
    mlp.shared_down.copy_(linear("shared_experts.down_proj"))


@torch.no_grad()
def read_target(folder: Path, dtype: torch.dtype) -> Target:
    """The served weights in a training model with fake quantisation off: INT4 values exact in fp32."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("model-*.safetensors")):
        tensors |= load_file(path)
    model = Target(target_shape(folder), dtype)
    model.embed.copy_(tensors[f"{PREFIX}model.embed_tokens.weight"])
    model.norm.copy_(tensors[f"{PREFIX}model.norm.weight"])
    model.head.copy_(tensors[f"{PREFIX}lm_head.weight"])
    for i, block in enumerate(model.layers()):
        prefix = f"{PREFIX}model.layers.{i}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            getattr(block, name).copy_(tensors[f"{prefix}{name}.weight"])
        for name in ATTENTION:
            getattr(block.attention, name).copy_(tensors[f"{prefix}self_attn.{name}.weight"])
        read_mlp(tensors, f"{prefix}mlp.", block.mlp)
    return model.requires_grad_(False)


def drafter_names(layers: int) -> dict[str, str]:
    """Checkpoint name -> name in our module, which lacks the `.weight`."""
    names = ["fc", "hidden_norm", "norm"]
    for i in range(layers):
        names += [f"layers.{i}.{n}" for n in ("input_layernorm", "post_attention_layernorm")]
        names += [f"layers.{i}.self_attn.{n}" for n in LAYER]
        names += [f"layers.{i}.mlp.{n}" for n in (*PAIR, "down_proj")]
    return {f"{n}.weight": n for n in names}


def write_drafter(model: Drafter, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    state = model.state_dict()
    tensors = {name: bf16(state[ours]) for name, ours in drafter_names(model.s.layers).items()}
    save(tensors, folder / "model.safetensors")
    write_json(folder / "config.json", drafter_config(model.s))


def read_drafter(folder: Path) -> Drafter:
    model = Drafter(drafter_shape(folder))
    tensors = load_file(folder / "model.safetensors")
    state = {ours: tensors[name].float() for name, ours in drafter_names(model.s.layers).items()}
    model.load_state_dict(state, strict=True)
    return model
