"""Launches over fixed buffers, as a CUDA graph from their second run on."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

MOST_KEPT = 96  # recorded passes of one kind; what was not used for the longest time is made again


class Recorded:
    """`launch` and nothing else: it reads and writes the same memory each time, and never waits for the device.

    The first run is op by op, which compiles what is new; the second records, and runs what it recorded. On a CPU,
    under Triton's interpreter, every run is the first.
    """

    def __init__(self, launch: Callable[[], None], device: torch.device) -> None:
        self._launch, self._device = launch, device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._compiled = False

    def __call__(self) -> None:
        if self._graph is None and self._compiled and self._device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._launch()
            self._graph = graph
        if self._graph is not None:
            self._graph.replay()
        else:
            self._launch()
            self._compiled = True


class Device:
    """A device, its buffers and its end of work. A CPU stands in for one under Triton's interpreter."""

    def __init__(self, place: torch.device) -> None:
        self.place, self.real = place, place.type == "cuda"
        self._stream = torch.cuda.current_stream(place) if self.real else None
        self.waited = 0.0  # seconds in all

    def room(self, *shape: int, of: torch.dtype = torch.int32) -> torch.Tensor:
        """Zeros on the device."""
        return torch.zeros(shape, dtype=of, device=self.place)

    def host_room(self, *shape: int, of: torch.dtype = torch.int32) -> torch.Tensor:
        """Zeros on the host, which the device copies from and to by itself."""
        return torch.zeros(shape, dtype=of, pin_memory=self.real)

    def recorded(self, launch: Callable[[], None]) -> Recorded:
        return Recorded(launch, self.place)

    def wait(self) -> None:
        """Until all that was launched is done."""
        if self._stream is not None:
            begun = time.perf_counter()
            self._stream.synchronize()
            self.waited += time.perf_counter() - begun


Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Kept(Generic[Key, Value]):
    """At most MOST_KEPT values by their keys, the least recently used dropped."""

    def __init__(self, make: Callable[[Key], Value]) -> None:
        self._make, self._values = make, OrderedDict[Key, Value]()

    def __getitem__(self, key: Key) -> Value:
        value = self._values.get(key)
        if value is None:
            value = self._values[key] = self._make(key)
            if len(self._values) > MOST_KEPT:
                self._values.popitem(last=False)
        self._values.move_to_end(key)
        return value

    def clear(self) -> None:
        self._values.clear()
