"""What one rank reads: its slices alone, the same bits as a slice of the whole, in bounded memory."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hedgerow.errors import InvalidRequest
from hedgerow.model import reading
from hedgerow.model.config import K2Config
from hedgerow.model.folder import stored
from hedgerow.model.loader import Checkpoint, CheckpointError
from hedgerow.model.reading import DTYPES, Meter, Progress, Staging
from hedgerow.model.tensors import Share, tensors
from hedgerow.weights.published import MINI, MINI_FP8, ONE_LAYER, Member, Sizes
from hedgerow.weights.rehearse import write

ROOT = Path(__file__).resolve().parents[2]
FOLDERS: list[tuple[Member, Sizes]] = [
    ("k2.6", dataclasses.replace(MINI, layers=2, vocab=1024, experts=3, top_k=2)),
    ("k2-instruct", dataclasses.replace(MINI_FP8, layers=2, vocab=1024, experts=2)),
]


def whole_tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return {name.removeprefix("language_model."): tensor for name, tensor in found.items()}


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize(("member", "s"), FOLDERS, ids=["int4", "fp8"])
def test_the_ranks_parts_make_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, member: Member, s: Sizes, ranks: int
) -> None:
    """Chunks of 5,000 bytes: every tensor is read in several."""
    monkeypatch.setattr(reading, "CHUNK", 5000)
    write(tmp_path, member, s)
    config, whole = K2Config.from_folder(tmp_path), whole_tensors(tmp_path)
    parts = [Checkpoint(tmp_path, Share(rank, ranks)) for rank in range(ranks)]
    divided = 0
    for checkpoint in parts:
        checkpoint.check(config)
    for wanted in tensors(config):
        if wanted.name not in whole:
            continue  # a scale of a plain matrix
        expected = whole[wanted.name]
        got = [part.raw(wanted.name, wanted.shape, (expected.dtype,)) for part in parts]
        together = got[0] if wanted.axis is None else torch.cat([g.view(torch.uint8) for g in got], wanted.axis)
        assert torch.equal(together.view(torch.uint8), expected.view(torch.uint8)), wanted.name
        assert all(g.shape == wanted.part(ranks) for g in got)
        divided += wanted.axis is not None
    assert divided > 20
    assert all(part._meter.done == part._meter.total for part in parts)


def test_heads_and_widths_go_to_the_rank_that_computes_them(tmp_path: Path) -> None:
    """Rank 1 of 2: the upper heads of q_b, kv_b and o, the upper half of the experts' width, of the vocabulary."""
    member, s = FOLDERS[0]
    write(tmp_path, member, s)
    whole, half = whole_tensors(tmp_path), Checkpoint(tmp_path, Share(1, 2))
    heads, base = s.heads // 2, "model.layers.1."
    q_b = half.weight(base + "self_attn.q_b_proj.weight", s.heads * (s.nope + s.rope), s.q_rank)
    assert torch.equal(q_b, whole[base + "self_attn.q_b_proj.weight"].float()[heads * (s.nope + s.rope) :])
    o = half.weight(base + "self_attn.o_proj.weight", s.hidden, s.heads * s.value)
    assert torch.equal(o, whole[base + "self_attn.o_proj.weight"].float()[:, heads * s.value :])
    name = base + "mlp.experts.1."
    up, down = half.packed(name + "up_proj", s.width, s.hidden), half.packed(name + "down_proj", s.hidden, s.width)
    assert torch.equal(up.words, whole[name + "up_proj.weight_packed"][s.width // 2 :])
    assert torch.equal(down.words, whole[name + "down_proj.weight_packed"][:, s.width // 16 :])
    assert torch.equal(down.scales, whole[name + "down_proj.weight_scale"].float()[:, s.width // 64 :])
    head = half.weight("lm_head.weight", s.vocab, s.hidden)
    assert torch.equal(head, whole["lm_head.weight"].float()[s.vocab // 2 :])
    assert half.weight(base + "mlp.gate.weight", s.experts, s.hidden).shape == (s.experts, s.hidden)


@pytest.mark.parametrize(
    ("member", "s", "ranks", "tensor", "expected"),
    [
        ("k2.6", dataclasses.replace(MINI, heads=6), 4, "layers.0.self_attn.q_b_proj", "rows that 4 ranks can share"),
        ("k2.6", MINI, 16, "layers.0.self_attn.q_b_proj", "rows that 16 ranks can share, each a multiple of 64"),
        ("k2.6", dataclasses.replace(MINI, vocab=1022), 4, "model.embed_tokens", "rows that 4 ranks can share"),
        (
            "k2.6",
            dataclasses.replace(MINI, width=96),
            4,
            "layers.1.mlp.experts.0.down_proj.weight_packed",
            "columns that 4 ranks can share, each a multiple of 4",
        ),
        (
            "k2-instruct",
            dataclasses.replace(MINI_FP8, width=512),
            8,
            "layers.1.mlp.shared_experts.gate_proj",
            "rows that 8 ranks can share, each a multiple of 128",
        ),
    ],
)
def test_what_does_not_divide_is_refused_before_it_is_read(
    tmp_path: Path, member: Member, s: Sizes, ranks: int, tensor: str, expected: str
) -> None:
    vocab = s.vocab if s.vocab < 2048 else 1024
    write(tmp_path, member, dataclasses.replace(s, layers=2, experts=2, top_k=1, vocab=vocab))
    checkpoint = Checkpoint(tmp_path, Share(0, ranks))
    with pytest.raises(CheckpointError) as error:
        checkpoint.check(K2Config.from_folder(tmp_path))
    assert tensor in error.value.tensor
    assert error.value.expected.startswith(expected)
    assert error.value.file.suffix == ".safetensors"
    assert list(stored(tmp_path).entries[error.value.tensor].shape) == error.value.actual
    assert checkpoint._meter.done == 0


@pytest.mark.parametrize("share", [Share(2, 2), Share(-1, 2), Share(0, 0)])
def test_a_rank_that_there_is_not_is_refused(tmp_path: Path, share: Share) -> None:
    with pytest.raises(InvalidRequest, match="a rank of 0"):
        Checkpoint(tmp_path, share)


def test_progress_has_bytes_and_time_left() -> None:
    now, told = [0.0], list[Progress]()
    meter = Meter(1000, told.append, lambda: now[0])
    for second in range(1, 11):
        now[0] = second
        meter.add(100)
    assert [p.done for p in told] == [200, 400, 600, 800, 1000]
    assert [p.left for p in told] == [8.0, 6.0, 4.0, 2.0, 0.0]
    assert str(Progress(30_000_000_000, 76_200_000_000, 15.0)) == "30.0 of 76.2 GB, 2.00 GB/s, 23 s left"


class LateStaging(Staging):
    """A device whose copies happen as late as they may: when the half is waited for, or at the end."""

    def __init__(self, size: int) -> None:
        self.queued: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[], []]
        halves = [torch.empty(size, dtype=torch.uint8) for _ in range(2)]
        super().__init__(torch.device("cpu"), halves, [LateEvent(copies) for copies in self.queued])

    def _copy(self, out: torch.Tensor, half: torch.Tensor) -> None:
        self.queued[self._turn].append((out, half))

    def arrive(self) -> None:
        for event in self._sent:
            event.synchronize()


class LateEvent:
    def __init__(self, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self.copies, self.waits = copies, 0

    def record(self) -> None:
        """Behind what was queued."""

    def synchronize(self) -> None:
        self.waits += 1
        for out, half in self.copies:
            out.copy_(half)
        self.copies.clear()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_half_that_is_on_its_way_to_a_device_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """The device's copies are as late as they may be; rows, columns and tensors of many chunks arrive all the same."""
    monkeypatch.setattr(reading, "CHUNK", 3000)
    member, s = FOLDERS[0]
    write(tmp_path, member, s)
    late, config = LateStaging(3000), K2Config.from_folder(tmp_path)
    plain, staged = Checkpoint(tmp_path, Share(ranks - 1, ranks)), Checkpoint(tmp_path, Share(ranks - 1, ranks))
    monkeypatch.setattr(staged._files, "_staging_for", lambda out: late)
    for wanted in tensors(config):
        got = staged.raw(wanted.name, wanted.shape, tuple(DTYPES.values()))
        late.arrive()
        expected = plain.raw(wanted.name, wanted.shape, tuple(DTYPES.values()))
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8)), wanted.name
    assert all(event.waits > 100 for event in late._sent)  # type: ignore[attr-defined]


LOAD = """
import sys
from pathlib import Path
from hedgerow.model.config import K2Config
from hedgerow.model.loader import Checkpoint
from hedgerow.model.reading import DTYPES
from hedgerow.model.tensors import Share, tensors
folder, rank, ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
config, checkpoint = K2Config.from_folder(folder), Checkpoint(folder, Share(rank, ranks))
checkpoint.check(config)
kept = [checkpoint.raw(w.name, w.shape, tuple(DTYPES.values())) for w in tensors(config)]
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(sum(t.nbytes for t in kept), int(peak.split()[1]) * 1024)
"""


@pytest.mark.timeout(300)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of memory from /proc")
def test_a_true_layer_is_loaded_in_one_and_a_half_times_its_share() -> None:
    """One MoE layer at K2.6's widths, 48 of its experts: 2 GB on disk. The peak counts everything, torch included."""
    with tempfile.TemporaryDirectory() as folder:  # pytest keeps its own folders for three runs
        write(Path(folder), "k2.6", dataclasses.replace(ONE_LAYER, experts=48, vocab=20480))
        done = subprocess.run(
            [sys.executable, "-c", LOAD, folder, "1", "2"], cwd=ROOT, capture_output=True, text=True, check=True,
            timeout=250, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    share, peak = map(int, done.stdout.split())
    assert share > 1_000_000_000
    assert peak <= 1.5 * share, f"{peak / 1e9:.2f} GB at the most, for a share of {share / 1e9:.2f} GB"


def test_types_have_one_name_each() -> None:
    assert len(set(DTYPES.values())) == len(DTYPES)
