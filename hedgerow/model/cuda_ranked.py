"""The target divided among ranks, on GPUs: each block's parts are added in rank order in float32, on every rank.

A process computes some of the ranks: one of them (`PeerRanks`, one process a GPU), or all (`Ranks`, the reference on
one GPU). Both have the same bits: a rank's part is rounded to the model's type, whether it goes over a wire or not, and
one kernel adds the parts. Where every rank of a host can write to the others' memory, it sends its own there first
(kernels/gpu/peer_norm.py); elsewhere parts are gathered (kernels/gpu/rank_norm.py), which gives the same sum. Embedding
rows come from one table that is put together at the start; logits are gathered, so that every rank draws and moves its
own cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from hedgerow.model.config import K2Config
from hedgerow.model.cuda import CudaK2
from hedgerow.model.cuda_plan import Fields, Shape
from hedgerow.model.cuda_step import CudaStep, Weights
from hedgerow.model.cuda_weights import Reader
from hedgerow.model.k2 import check_ranks
from hedgerow.model.loader import Checkpoint
from hedgerow.model.tensors import Share
from kernels.collectives import PeerRanks, Ranks
from kernels.gpu.linear import linear
from kernels.gpu.peer_norm import peer_norm
from kernels.gpu.peers import PeerBuffer, share
from kernels.gpu.rank_norm import rank_norm, rank_part


def share_of(c: K2Config, ranks: int) -> K2Config:
    """The sizes of what one of `ranks` computes; tokens are the whole vocabulary's."""
    return replace(
        c, num_attention_heads=c.num_attention_heads // ranks, intermediate_size=c.intermediate_size // ranks,
        moe_intermediate_size=c.moe_intermediate_size // ranks,
    )  # fmt: skip


class Sums:
    """Where a process's parts go, and how all of them are added. Attention's and the feed-forward block's take turns:
    two buffers of parts, of `rows` rows each. `gathered`: never in the ranks' own memory. A call of all ranks."""

    def __init__(
        self, ranks: Ranks, rows: int, hidden: int, device: torch.device, dtype: torch.dtype, gathered: bool
    ) -> None:
        self.ranks, self._peers = ranks, list[PeerBuffer]()
        if device.type == "cuda" and isinstance(ranks, PeerRanks) and not gathered:
            made = [share(ranks, ranks.mine[0], rows, hidden, device) for _ in range(2)]
            self._peers = [one for one in made if one is not None and None not in made]
        if self._peers:
            self._parts = [[peer.part] for peer in self._peers]
        else:
            room = torch.zeros(2, len(ranks.mine), rows, hidden, device=device, dtype=dtype)
            self._parts = [list(half) for half in room]

    @property
    def direct(self) -> bool:
        """Parts are written where the other ranks read them."""
        return bool(self._peers)

    def parts(self, block: int, rows: int) -> list[torch.Tensor]:
        """[rows, hidden] of each of this process's ranks, to be filled."""
        return [part[:rows] for part in self._parts[block]]

    def close(
        self, block: int, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor, eps: float, tap: torch.Tensor | None
    ) -> None:
        """x += all ranks' parts; `out` is the norm of it."""
        if self._peers:
            peer_norm(x, self._peers[block], w, out, eps, tap)
        else:
            rank_norm(x, self.ranks.gather(self.parts(block, len(x))), w, out, eps, tap)


class RankedStep(CudaStep):
    """The pass over one shape of step, of this process's ranks."""

    shares: Sequence[Weights]  # of each of them; norms and tables are the first one's
    sums: Sums
    block = 0  # whose parts are added next: attention's, then the feed-forward block's

    def attend(self, number: int, cache: torch.Tensor, masks: object) -> None:
        self.block = 0
        for mine, part in zip(self.shares, self.sums.parts(0, self.shape.rows), strict=True):
            self.attention(mine.layers[number], cache, masks, part)  # type: ignore[arg-type]

    def feed(self, number: int) -> None:
        self.block, delta = 1, self.room.delta[: self.shape.rows]
        for mine, part in zip(self.shares, self.sums.parts(1, self.shape.rows), strict=True):
            routed = self.mlp(number, mine.layers[number], part)
            if routed is not None:
                rank_part(delta, routed, part)

    def close(
        self,
        w: torch.Tensor,
        routed: torch.Tensor | None = None,
        tap: torch.Tensor | None = None,
        behind: torch.Tensor | None = None,
    ) -> None:
        n = self.shape.rows
        self.sums.close(self.block, self.room.x[:n], w, self.room.normed[:n], self.c.rms_norm_eps, tap)

    def head(self, logits: torch.Tensor) -> None:
        normed, rows = self.room.normed[: self.shape.rows], len(logits)
        parts = [normed.new_empty(rows, len(mine.head), dtype=torch.float32) for mine in self.shares]
        for mine, part in zip(self.shares, parts, strict=True):
            linear(normed, mine.head, part, self.fields.wanted)
        logits.copy_(self.sums.ranks.join(parts))


class RankedK2(CudaK2):
    """CudaK2's interface for the ranks `ranks.mine` of `ranks.count`. All ranks make the same calls in the same order.

    `forward`, `verify` and `prepare` wait for the other ranks on the device, without a bound: whoever makes the group
    watches over it.
    """

    def __init__(
        self, config: K2Config, readers: Sequence[Reader], ranks: Ranks, feature_layers: Sequence[int],
        latent_eps: float | None = None,
    ) -> None:  # fmt: skip
        self.ranks, self.shards, self._readers, self._gathered = ranks, ranks.count, readers, False
        super().__init__(config, readers[0], feature_layers, latent_eps)

    @classmethod
    def of(
        cls, folder: Path, feature_layers: Sequence[int], device: torch.device, ranks: Ranks,
        dtype: torch.dtype = torch.bfloat16,
    ) -> RankedK2:  # fmt: skip
        """Raises ConfigError or CheckpointError as CudaK2.load does, also for a model that the ranks cannot share."""
        config = K2Config.from_folder(folder)
        parts = [Checkpoint(folder, Share(rank, ranks.count)) for rank in ranks.mine]
        check_ranks(parts, config)
        for part in parts:
            part.compare()
        return cls(config, [Reader(part, device, dtype) for part in parts], ranks, feature_layers)

    @property
    def direct(self) -> bool:
        """Whether the ranks write to each other's memory."""
        return self._sums.direct

    def gather(self) -> None:
        """From now on parts are gathered, wherever they are. A call of all ranks, between two steps."""
        self.device.wait()
        self._gathered = True
        self._make_room(self._room.rows)

    def step(self, shape: Shape, fields: Fields[torch.Tensor]) -> CudaStep:
        made = RankedStep(
            self.share, self._shares[0], self.feature_layers, self.latent_eps, self._room, shape, fields
        )  # fmt: skip
        made.shares, made.sums = self._shares, self._sums
        return made

    def _read(self, r: Reader) -> Weights:
        self.share = share_of(self.config, self.shards)
        self._shares = [super(RankedK2, self)._read(reader) for reader in self._readers]
        self.kernel_law += f"-shards-{self.shards}"
        table = self.ranks.gather([mine.embedding for mine in self._shares]).flatten(0, 1)
        self._shares[0] = self._shares[0]._replace(embedding=table)
        return self._shares[0]

    def _make_room(self, rows: int) -> None:
        super()._make_room(rows)
        hidden, place = self.config.hidden_size, self.device.place
        self._sums = Sums(self.ranks, rows, hidden, place, self.dtype, self._gathered)
