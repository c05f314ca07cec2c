"""DFlash 2's grouped dynamic causal convolution, around both halves of a layer.

    out_t = sum_o (base[o] + dynamic_{t, o, group}) * x_{t - o}        o = 0 .. taps - 1; before a block x is 0

`dynamic` is one product of the half's normed input and serves both what goes in and what comes out, each with a base of
its own. Rows are a block's: it never reaches into another one, or into the context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from hedgerow.model.draft_config import DraftConfig
from hedgerow.model.loader import Checkpoint


class StoredHalf(NamedTuple):
    """The tensors of one half of a layer, as checkpoints have them."""

    base: str
    base_shape: tuple[int, int, int]  # 2, taps, hidden
    projection: str  # without `.weight`
    projection_shape: tuple[int, int]  # 2 * taps * groups, hidden


def stored_halves(layer: str, c: DraftConfig) -> tuple[StoredHalf, ...]:
    """Around attention and MLP of the layer that is named so; none where the drafter has none."""
    if c.convolution is None:
        return ()
    taps, group = c.convolution
    shapes = (2, taps, c.hidden_size), (2 * taps * (c.hidden_size // group), c.hidden_size)
    names = (f"{layer}{half}_conv." for half in ("attention", "mlp"))
    return tuple(StoredHalf(f"{n}base_kernel", shapes[0], f"{n}kernel_projection", shapes[1]) for n in names)


@dataclass(frozen=True)
class GroupedConvolution:
    """Of one half of a layer."""

    base: torch.Tensor  # [2, taps, hidden]: into the half, out of it
    projection: torch.Tensor  # [hidden, 2 * taps * groups]
    group: int

    @classmethod
    def both(cls, checkpoint: Checkpoint, base: str, c: DraftConfig) -> tuple[GroupedConvolution, ...]:
        """Around attention and MLP; none where the drafter has none."""
        if c.convolution is None:
            return ()
        return tuple(
            cls(
                checkpoint.weight(half.base, *half.base_shape),
                checkpoint.weight(f"{half.projection}.weight", *half.projection_shape).T.contiguous(),
                c.convolution.group,
            )
            for half in stored_halves(base, c)
        )

    def before(self, y: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What goes in, of rows y [S * block, hidden], and the kernel of what comes out."""
        dynamic = (y @ self.projection).view(len(y), 2, self.base.shape[1], -1)
        return self.apply(y, self.base[0], dynamic[:, 0], block), dynamic[:, 1]

    def after(self, out: torch.Tensor, kernel: torch.Tensor, block: int) -> torch.Tensor:
        return self.apply(out, self.base[1], kernel, block)

    def apply(self, x: torch.Tensor, base: torch.Tensor, dynamic: torch.Tensor, block: int) -> torch.Tensor:
        """x [S * block, hidden], base [taps, hidden], dynamic [S * block, taps, groups]."""
        blocks = x.view(-1, block, x.shape[1] // self.group, self.group)
        weights = base.view(len(base), -1, self.group) + dynamic.view(*blocks.shape[:2], len(base), -1, 1)
        total = weights[:, :, 0] * blocks
        for o in range(1, len(base)):
            total[:, o:] += weights[:, o:, o] * blocks[:, :-o]
        return total.view_as(x)
