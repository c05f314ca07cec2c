"""A drafter's own row for its masks is read, and what nothing reads is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hedgerow.model.compiled_dflash import CompiledDFlash
from hedgerow.model.dflash import DFlashModel
from hedgerow.model.draft_config import DraftConfig
from hedgerow.model.headers import CheckpointError
from hedgerow.model.loader import Checkpoint, checkpoint_hash
from hedgerow.model.select import load_drafter
from tests.compiled_builds import missing_compiler
from tests.tiny import TinyPaths, write_tiny

needs_compiler = pytest.mark.skipif(bool(missing_compiler()), reason=missing_compiler())
MASK, EMBEDDING = 510, "language_model.model.embed_tokens.weight"  # the tiny drafter's, and its target's


@pytest.fixture
def paths(tmp_path: Path) -> TinyPaths:
    return write_tiny(tmp_path)


def drafted(model: DFlashModel | CompiledDFlash) -> torch.Tensor:
    state, features = model.new_state(), torch.randn(9, model.feature_width, generator=torch.manual_seed(1))
    model.append(state, features, 0)
    return model.draft([state], [7], [9])


def embedding_file(target: Path) -> Path:
    return next(file for file in sorted(target.glob("*.safetensors")) if EMBEDDING in load_file(file))


@needs_compiler
@pytest.mark.parametrize("kind", [DFlashModel, CompiledDFlash])
@pytest.mark.parametrize("beside", [False, True])
def test_the_masks_row_is_the_drafters_own(
    paths: TinyPaths, kind: type[DFlashModel] | type[CompiledDFlash], beside: bool
) -> None:
    """As published beside drafters whose mask the target never trained: a tensor among the others, or in a file that
    no index names. It drafts as for a target whose row it were, and says the hash of the one that it has.
    """
    plain = kind.load(paths.drafter, paths.target)
    before, hashes = drafted(plain), [checkpoint_hash(paths.drafter)]
    weights = load_file(paths.drafter / "model.safetensors")
    for row in (load_file(embedding_file(paths.target))[EMBEDDING][MASK], torch.linspace(-2, 2, 64).bfloat16()):
        if beside:
            save_file({"mask_embedding": row[None].contiguous()}, paths.drafter / "mask_embedding.safetensors")
        else:
            save_file(weights | {"mask_embedding": row.contiguous()}, paths.drafter / "model.safetensors")
        own = kind.load(paths.drafter, paths.target)
        after = drafted(own)
        hashes.append(checkpoint_hash(paths.drafter))
        assert own.target_head_hash == plain.target_head_hash
        load_drafter(paths.drafter, paths.target, "torch")
    assert len(set(hashes)) == 3, "another row is another drafter"
    assert not torch.equal(before, after)
    file = embedding_file(paths.target)
    held = load_file(file)
    held[EMBEDDING][MASK] = row
    save_file(held, file)
    save_file(weights, paths.drafter / "model.safetensors")
    (paths.drafter / "mask_embedding.safetensors").unlink(missing_ok=True)
    assert torch.equal(drafted(kind.load(paths.drafter, paths.target)), after)


def test_so_it_is_on_a_gpu(paths: TinyPaths) -> None:
    """Its tables, on the host here."""
    pytest.importorskip("triton")
    from hedgerow.model.cuda_draft_weights import DraftWeights
    from hedgerow.model.cuda_weights import Reader

    row = torch.linspace(-2, 2, 64)
    save_file({"mask_embedding": row}, paths.drafter / "mask_embedding.safetensors")
    config, place = DraftConfig.from_folder(paths.drafter), torch.device("cpu")
    reader = Reader(Checkpoint(paths.drafter), place, torch.bfloat16)
    found, _ = DraftWeights.load(config, reader, paths.target, None, False)
    expected = load_file(embedding_file(paths.target))[EMBEDDING]
    expected[MASK] = row
    assert torch.equal(found.embedding, expected)


@pytest.mark.parametrize(
    ("name", "shape", "needed"),
    [
        ("embed_tokens.weight", (512, 64), "no tensor that there is no code for"),
        ("lm_head.weight", (512, 64), "no tensor that there is no code for"),
        ("d2t", (32,), "no tensor that there is no code for"),
        ("layers.0.self_attn.sinks", (4,), "no tensor that there is no code for"),
        ("layers.2.input_layernorm.weight", (64,), "no tensor that there is no code for"),
        ("layers.0.self_attn.q_proj.bias", (64,), "no tensor that there is no code for"),
        ("mask_embedding", (65,), "shape [64]"),
        ("mask_embedding", (2, 64), "shape [64]"),
    ],
)
def test_a_tensor_that_nothing_reads_is_refused(
    paths: TinyPaths, name: str, shape: tuple[int, ...], needed: str
) -> None:
    weights = load_file(paths.drafter / "model.safetensors")
    save_file(weights | {name: torch.zeros(shape)}, paths.drafter / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        load_drafter(paths.drafter, paths.target, "torch")
    assert (error.value.tensor, error.value.file.name) == (name, "model.safetensors")
    assert needed in error.value.expected
    assert str(shape[0]) in str(error.value.actual)


def test_a_mask_in_a_pickle_is_named_and_not_opened(paths: TinyPaths) -> None:
    (paths.drafter / "mask_embedding.pt").write_bytes(b"PK\x03\x04 whatever is in it")
    with pytest.raises(
        CheckpointError, match=r"mask_embedding\.pt.*mask_embedding\.safetensors: a pickle is not opened"
    ):
        load_drafter(paths.drafter, paths.target, "torch")
    save_file({"mask_embedding": torch.zeros(64)}, paths.drafter / "mask_embedding.safetensors")
    load_drafter(paths.drafter, paths.target, "torch")  # beside it the same as a tensor


def test_a_mask_that_is_there_twice_is_refused(paths: TinyPaths) -> None:
    weights = load_file(paths.drafter / "model.safetensors")
    for name, others in (("model.safetensors", weights), ("mask_embedding.safetensors", {})):
        save_file(others | {"mask_embedding": torch.zeros(64)}, paths.drafter / name)
    with pytest.raises(CheckpointError, match=r"mask_embedding.*only in model\.safetensors"):
        load_drafter(paths.drafter, paths.target, "torch")
