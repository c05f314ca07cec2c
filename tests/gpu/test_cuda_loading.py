"""Checkpoints on their way to a GPU: stored types through bounded memory, FP8 and plain experts."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("triton")

from hedgerow.model import reading
from hedgerow.model.config import K2Config
from hedgerow.model.cuda import CudaK2
from hedgerow.model.cuda_memory import Asked, check_device
from hedgerow.model.cuda_weights import Packed, Reader, SparseMlp, check_sizes
from hedgerow.model.fields import ConfigError
from hedgerow.model.k2 import K2Model
from hedgerow.model.loader import INDEX, Checkpoint, CheckpointError
from hedgerow.model.memory import on_card
from hedgerow.model.reading import Progress
from hedgerow.model.selfcheck import PARENTS, tree_logits
from hedgerow.weights.convert import convert
from hedgerow.weights.published import MINI, MINI_FP8, TRUE
from hedgerow.weights.published import config as published_config
from hedgerow.weights.rehearse import write
from kernels.fp8 import fp8_unpack
from tests.load_memory import loaded, needs_proc

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda")
SMALL = dataclasses.replace(MINI, layers=2, vocab=512, experts=3, top_k=2)
SMALL_FP8 = dataclasses.replace(
    MINI_FP8, layers=2, vocab=512, width=256, heads=2, dense_width=256, kv_rank=128, rope=32
)
pytestmark = pytest.mark.gpu
NEEDS_KERNELS = pytest.mark.skipif(not INTERPRETED and DEVICE.type == "cpu", reason="needs a CUDA device")


def make_plain(folder: Path) -> None:
    """FP8 becomes bfloat16, which is another model: code times scale is rounded."""
    for file in folder.glob("*.safetensors"):
        stored = load_file(file)
        scales = {name: stored.pop(name) for name in list(stored) if name.endswith("_scale_inv")}
        for name, tensor in scales.items():
            matrix = name.removesuffix("_scale_inv")
            stored[matrix] = fp8_unpack(stored[matrix], tensor).bfloat16()
        save_file(stored, file)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = {n: f for n, f in index["weight_map"].items() if not n.endswith("_scale_inv")}
    (folder / INDEX).write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("converted", [False, True])
def test_experts_come_as_they_are_stored(tmp_path: Path, converted: bool) -> None:
    """INT4: words and scales under one another, and not one matrix in float32."""
    write(tmp_path / "a", "k2.6", SMALL)
    if converted:
        convert(tmp_path / "a", tmp_path / "b", 1, lambda text: None)
    folder, c = tmp_path / ("b" if converted else "a"), K2Config.from_folder(tmp_path / "a")
    plain, told = Checkpoint(tmp_path / "a"), list[Progress]()
    checkpoint = Checkpoint(folder, watcher=told.append)
    checkpoint._meter._every = 0.0  # tell of every tensor
    mlp = SparseMlp.load(Reader(checkpoint, DEVICE, torch.bfloat16), "model.layers.1.mlp.", c)
    assert isinstance(mlp.gate_up, Packed)
    assert isinstance(mlp.down, Packed)
    assert (mlp.gate_up.words.dtype, mlp.gate_up.scales.dtype) == (torch.int32, torch.bfloat16)
    for e in range(c.n_routed_experts):
        base = f"model.layers.1.mlp.experts.{e}."
        gate, up = (plain.packed(f"{base}{n}_proj", SMALL.width, SMALL.hidden) for n in ("gate", "up"))
        assert torch.equal(mlp.gate_up[0][e].cpu(), torch.cat([gate.words, up.words]))
        assert torch.equal(mlp.gate_up[1][e].float().cpu(), torch.cat([gate.scales, up.scales]))
        down = plain.packed(f"{base}down_proj", SMALL.hidden, SMALL.width)
        assert torch.equal(mlp.down[0][e].cpu(), down.words)
    read = sum(t.nbytes for t in (mlp.shared_router, mlp.shared_down, mlp.bias, *mlp.gate_up, *mlp.down))
    shapes = 3 * 8 * c.n_routed_experts  # two integers of four bytes each
    assert told[-1].done == read + shapes, "every byte is told, and none is read twice"
    assert told[-1].total > read
    assert [p.done for p in told] == sorted(p.done for p in told)


def test_a_matrix_of_another_shape_than_it_says_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "k2.6", SMALL)
    checkpoint = Checkpoint(tmp_path)
    names = ["model.layers.1.mlp.experts.0.gate_proj"]
    with pytest.raises(reading.CheckpointError, match=r"weight_shape"):
        checkpoint.stacked_packed(names, SMALL.width * 2, SMALL.hidden)


@NEEDS_KERNELS
@pytest.mark.parametrize("kind", ["fp8", "plain"])
def test_what_is_no_int4_is_what_pytorch_computes(tmp_path: Path, kind: str) -> None:
    write(tmp_path, "k2-instruct", SMALL_FP8)
    if kind == "plain":
        make_plain(tmp_path)
    config, dtype = K2Config.from_folder(tmp_path), torch.float32 if INTERPRETED else torch.bfloat16
    assert (config.fp8, config.int4_experts) == (kind == "fp8", False)
    model, reference = CudaK2.load(tmp_path, (0, 1), DEVICE, dtype), K2Model.load(tmp_path, (0, 1))
    stored = model._weights.layers[1].mlp.gate_up  # type: ignore[union-attr]
    assert stored[0].dtype == (torch.float8_e4m3fn if kind == "fp8" else dtype), "experts keep their codes"
    prompt, tree = [(37 * i + 5) % 256 for i in range(6)], [(11 * i + 3) % 256 for i in range(len(PARENTS))]
    got = tree_logits(model, prompt, tree, [len(prompt)]).cpu()
    expected = tree_logits(reference, prompt, tree, [len(prompt)])
    scale = float(expected.std())
    if INTERPRETED:
        assert float((got - expected).abs().max()) < 1e-4 * max(1.0, scale)
    else:
        assert float((got - expected).square().mean().sqrt()) < 0.05 * scale


def test_sizes_without_code_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "k2-instruct", SMALL_FP8)
    c = dataclasses.replace(K2Config.from_folder(tmp_path), moe_intermediate_size=192)
    with pytest.raises(ConfigError, match=r"moe_intermediate_size: 192 .*a multiple of 128, on a CUDA device"):
        check_sizes(c, tmp_path / "config.json")
    check_sizes(dataclasses.replace(c, fp8=False), tmp_path / "config.json")


@pytest.mark.parametrize(
    ("change", "shards", "said"),
    [
        ({"kv_lora_rank": 64}, 1, r"kv_lora_rank: 64 .*: 512 beside 64 or 128 beside 32, .*qk_rope_head_dim.* is 32$"),
        ({"qk_rope_head_dim": 64}, 1, r"kv_lora_rank: 128 .*: 512 beside 64 or 128 beside 32, .*qk_rope_.* is 64$"),
        ({"moe_intermediate_size": 128}, 2, r"moe_intermediate_size: 128 .*a multiple of 256, .* with 2 ranks"),
        ({"hidden_size": 320}, 2, r"hidden_size: 320 .*a multiple of 128, on a CUDA device$"),
    ],
)
def test_what_would_fail_in_the_first_step_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, int], shards: int, said: str
) -> None:
    write(tmp_path, "k2-instruct", SMALL_FP8)
    c = K2Config.from_folder(tmp_path)
    check_sizes(c, tmp_path / "config.json", shards)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1 << 40, 1 << 40))
    changed, place = dataclasses.replace(c, **change), torch.device("cuda", 0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=said):
        check_device(tmp_path, changed, place, Asked(), 2, shards)
    check_device(tmp_path, c, place, Asked(), 2, shards)


def test_memory_is_for_weights_cache_and_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """K2.6 on one H200 of eight: what its buffers are is what its buffers take."""
    (tmp_path / "config.json").write_text(json.dumps(published_config("k2.6", TRUE)))
    c, place = K2Config.from_folder(tmp_path), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (int(93e9), int(150e9)))
    check_device(tmp_path, c, place, Asked(), 6, 8)  # with the 8 % of the card that a cache of any size leaves
    for asked in (Asked(pages=4000), Asked(rows=8192)):
        with pytest.raises(CheckpointError) as refused:
            check_device(tmp_path, c, place, asked, 6, 8)
        assert refused.value.file == tmp_path
        found = re.fullmatch(
            r"([\d.]+) GB of free memory on cuda:0, for ([\d.]+) of weights, ([\d.]+) of cache \((\d+) pages of 64 "
            r"tokens\) and ([\d.]+) for steps", refused.value.expected,
        )  # fmt: skip
        assert found is not None, refused.value.expected
        needed, read, cache, pages, steps = map(float, found.groups())
        assert needed == pytest.approx(read + cache + steps, abs=0.2)
        assert read == pytest.approx(on_card(c, 8) / 1e9, abs=0.06)
        assert (pages, refused.value.actual) == (asked.pages or 1, "93.0 GB")


@pytest.mark.timeout(400)
@needs_proc
def test_the_engine_loads_a_true_layer_in_one_and_a_half_times_its_weights() -> None:
    """One MoE layer at K2.6's widths, 48 of its experts, 2 GB. The device is the host here, so that the peak is the
    weights themselves, the engine's buffers, PyTorch and Triton, and whatever a load needs beside them."""
    load = 'model, checkpoint = CudaK2.load(folder, (0,), torch.device("cpu")), Checkpoint(folder)'
    found = loaded("import torch\nfrom hedgerow.model.cuda import CudaK2", load, experts=48, seconds=350)
    assert found.share > 1_900_000_000
    assert found.peak <= 1.5 * found.share, found
