"""Launches over fixed buffers, as a CUDA graph from their second run on."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, ParamSpec, TypeVar

import torch

log = logging.getLogger(__name__)
NEWS = 2.0  # seconds between two lines about passes that are prepared
MOST_KEPT = 384  # recorded passes of one kind; what was not used for the longest time is made again


Given = ParamSpec("Given")
Result = TypeVar("Result")


def inference(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """`torch.inference_mode()`, entered only where it is not in force: that takes longer than many a call."""
    within = torch.inference_mode()(function)

    @functools.wraps(function)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        return function(*args, **kwargs) if torch.is_inference_mode_enabled() else within(*args, **kwargs)

    return call


class Recorded:
    """`launch` and nothing else: it reads and writes the same memory each time, and never waits for the device.

    The first run is op by op, which compiles what is new; the second records, and runs what it recorded. On a CPU,
    under Triton's interpreter, every run is the first.
    """

    def __init__(self, launch: Callable[[], None], device: Device) -> None:
        self._launch, self._device = launch, device
        self._graph: torch.cuda.CUDAGraph | None = None
        self._compiled = False

    def __call__(self) -> None:
        self._device.busy = True
        self._device.made += self._graph is None and self._device.real
        if self._graph is None and self._compiled and self._device.real:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._launch()
            self._graph = graph
        if self._graph is not None:
            self._graph.replay()
        else:
            self._launch()
            self._compiled = True

    def prepare(self) -> None:
        """Runs until it is recorded: whoever comes next compiles nothing."""
        for _ in range(2 if self._device.real else 1):
            self()


class Device:
    """A device, its buffers and its end of work. A CPU stands in for one under Triton's interpreter."""

    def __init__(self, place: torch.device) -> None:
        self.place, self.real = place, place.type == "cuda"
        self._stream = torch.cuda.current_stream(place) if self.real else None
        self._side = torch.cuda.Stream(place) if self.real else None
        self._apart = False  # something is under way in it
        self.busy = False  # something was launched that was not waited for
        self.waited = 0.0  # seconds in all
        self.made = 0  # launches that no graph repeated

    def room(self, *shape: int, of: torch.dtype = torch.int32) -> torch.Tensor:
        """Zeros on the device."""
        return torch.zeros(shape, dtype=of, device=self.place)

    def host_room(self, *shape: int, of: torch.dtype = torch.int32) -> torch.Tensor:
        """Zeros on the host, which the device copies from and to by itself."""
        return torch.zeros(shape, dtype=of, pin_memory=self.real)

    def recorded(self, launch: Callable[[], None]) -> Recorded:
        return Recorded(launch, self)

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """What is launched in the block comes behind all before it, and runs beside what follows until `joined`: a copy
        of what nothing writes in between."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream(self.place))
        with torch.cuda.stream(self._side):
            yield
        self._apart = True

    def joined(self) -> None:
        """What follows comes behind what was launched `beside`."""
        if self._side is not None and self._apart:
            torch.cuda.current_stream(self.place).wait_stream(self._side)
            self._apart = False

    def wait(self) -> None:
        """Until all that was launched is done."""
        if self.busy and self._stream is not None:
            begun = time.perf_counter()
            self._stream.synchronize()
            self.waited += time.perf_counter() - begun
        self.busy = False

    def mark(self) -> torch.cuda.Event | None:
        """The end of what was launched so far, for `reach`; None where all of it is done."""
        return None if self._stream is None else self._stream.record_event()

    def reach(self, mark: torch.cuda.Event | None) -> None:
        """Until the device is there; what was launched behind it may still run."""
        if mark is not None:
            begun = time.perf_counter()
            mark.synchronize()
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


def prepare_all(what: str, keys: Sequence[Key], recorded: Callable[[Key], Recorded], device: Device) -> None:
    """Compiles and records passes, and waits for each; the log tells how far it is. `what` they are: "a step"."""
    begun = told = time.monotonic()
    for done, key in enumerate(keys):
        if time.monotonic() - told > NEWS:
            told = time.monotonic()
            log.info("warming up: %d of %d shapes of %s after %.0f s", done, len(keys), what, told - begun)
        recorded(key).prepare()
        device.wait()
    log.info("warm: %d shapes of %s in %.1f s", len(keys), what, time.monotonic() - begun)
