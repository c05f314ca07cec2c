"""The bundled target and drafter against Hugging Face and `dflash`: the checkpoints that we serve, not random ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hedgerow.model.dflash import DFlashModel
from hedgerow.model.k2 import K2Model
from tests.peers import PEER_LATENT_EPS, TOLERANCE, DraftPeer, chain, embed_block, peer_model

MODELS = Path(__file__).parents[2] / "models"
TARGET, DRAFTER = MODELS / "sapling", MODELS / "sapling-dflash"
LENGTH = 200


@pytest.fixture(scope="module")
def drafter() -> DFlashModel:
    return DFlashModel.load(DRAFTER, TARGET)


def test_the_bundled_models_are_within_1e_4_of_their_peers(drafter: DFlashModel) -> None:
    """Logits and the most likely token of every row; then the drafter's hidden states on these features, in rounds."""
    model = K2Model.load(TARGET, drafter.feature_layers, latent_eps=PEER_LATENT_EPS)
    tokens = torch.randint(256, 2000, (LENGTH,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = peer_model(TARGET, model.config.n_routed_experts)(tokens[None]).logits[0]
    out = model.forward([chain(tokens.tolist(), 0, LENGTH, range(4))], model.new_cache(4))
    assert (out.logits - expected).abs().max() <= TOLERANCE
    assert torch.equal(out.logits.argmax(-1), expected.argmax(-1))

    peer, state, end = DraftPeer(DRAFTER, drafter.block_size), drafter.new_state(), 0
    for rows in (150, 1, 8, 3):
        features = out.features[end : end + rows].clone()
        drafter.append(state, features, end)
        end += rows
        anchor = int(tokens[end])
        hidden = peer.round(features, embed_block(drafter, anchor), end)
        assert (drafter.hidden([state], [anchor], [end])[0] - hidden).abs().max() <= TOLERANCE
