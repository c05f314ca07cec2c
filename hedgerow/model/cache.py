"""The paged latent cache of MLA: one vector per token and layer, in pages of 64 tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.kv_compact import kv_compact
from kernels.mla_tree_attention import PAGE


class LatentCache:
    """`pages` pages for every layer. A flat slot is page * 64 + offset. Owns its memory; hands out no page numbers."""

    page_size = PAGE

    def __init__(self, layers: int, pages: int, width: int) -> None:
        self.pages = pages
        self.data = torch.zeros(layers, pages * PAGE, width)  # zeros: masked positions are read, and must be finite
        self.layers = list(self.data)  # views [slots, width]

    def copy(self, src_slots: Sequence[int], dst_slots: Sequence[int]) -> None:
        """Moves latents in all layers; every source is read before any target is written."""
        if len(src_slots):
            kv_compact(self.data, torch.tensor(src_slots), torch.tensor(dst_slots))
