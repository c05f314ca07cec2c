"""The paged latent cache on a GPU. A model's caches lie in one arena, so that a captured step serves any of them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from hedgerow.errors import InvalidRequest
from hedgerow.model.cuda_graph import Device, Kept, Recorded
from hedgerow.model.cuda_plan import bucket
from kernels.gpu.row_layout import PAGE


class Arena:
    """Pages of 64 slots for every layer: data [layers, slots, width]. Caches take runs of them and give them back.

    It grows by moving: `data` is then another tensor, and `grown` counts that. Not safe for use by several threads.
    """

    def __init__(self, layers: int, width: int, device: Device, dtype: torch.dtype) -> None:
        self.data = device.room(layers, 0, width, of=dtype)
        self.grown = 0
        self._device, self._moves = device, Kept(self._make)
        self._free: list[tuple[int, int]] = []  # (first page, pages), in order

    @property
    def pages(self) -> int:
        return self.data.shape[1] // PAGE

    @property
    def free(self) -> int:
        """Pages that nobody has."""
        return sum(size for _, size in self._free)

    def take(self, pages: int) -> int:
        """The first page of a run of `pages`."""
        for n, (first, size) in enumerate(self._free):
            if size >= pages:
                self._free[n : n + 1] = [(first + pages, size - pages)] if size > pages else []
                return first
        return self._grow(pages)

    def give(self, first: int, pages: int) -> None:
        """Takes a run back, and joins it with its free neighbours."""
        merged = list[tuple[int, int]]()
        for begin, size in sorted([*self._free, (first, pages)]):
            if merged and sum(merged[-1]) == begin:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((begin, size))
        self._free = merged

    def _grow(self, pages: int) -> int:
        first, old = self.pages, self.data
        self._device.wait()
        layers, slots, width = old.shape
        self.data = torch.zeros(layers, slots + pages * PAGE, width, device=old.device, dtype=old.dtype)
        self.data[:, :slots] = old
        self.grown += 1
        self._moves.clear()
        return first

    def move(self, sources: Sequence[int], targets: Sequence[int], base: int) -> None:
        """Copies slots `base` on, in all layers; every source is read before any target is written."""
        count = len(sources)
        size = bucket(count)
        sent, launch = self._moves[size]
        self._device.wait()  # the last move's numbers may still be on their way
        slots = sent.numpy()
        for line, given in zip(slots, (sources, targets), strict=True):
            line[:count] = given
            line[count:] = given[0]  # padding repeats the first
        slots += base
        launch()

    def _make(self, size: int) -> tuple[torch.Tensor, Recorded]:
        sent, at = self._device.host_room(2, size, of=torch.int64), self._device.room(2, size, of=torch.int64)

        def launch() -> None:
            at.copy_(sent, non_blocking=True)
            self.data.index_copy_(1, at[1], self.data.index_select(1, at[0]))

        return sent, self._device.recorded(launch)


class CudaCache:
    """`pages` pages of 64 tokens for every layer, in its model's arena. A flat slot is page * 64 + offset."""

    page_size = PAGE

    def __init__(self, arena: Arena, pages: int) -> None:
        if pages < 1:
            raise InvalidRequest("pages", pages, "at least 1")
        self.arena, self.pages = arena, pages
        self.base = arena.take(pages)
        weakref.finalize(self, arena.give, self.base, pages)

    @torch.inference_mode()
    def copy(self, src_slots: Sequence[int], dst_slots: Sequence[int]) -> None:
        """Moves latents in all layers; every source is read before any target is written.

        InvalidRequest where there is no such slot.
        """
        if len(src_slots) != len(dst_slots):
            raise InvalidRequest("dst_slots", len(dst_slots), f"as many as src_slots, {len(src_slots)}")
        if not len(src_slots):
            return
        slots = [*src_slots, *dst_slots]
        if min(slots) < 0 or max(slots) >= self.pages * PAGE:
            raise InvalidRequest("slots", slots, f"slots of the cache's {self.pages} pages")
        self.arena.move(src_slots, dst_slots, self.base * PAGE)

    def read(self, slots: Sequence[int]) -> torch.Tensor:
        """Latent and turned key of these slots, [layers, slots, width], copied to the host."""
        return self.arena.data[:, [self.base * PAGE + slot for slot in slots]].cpu()
