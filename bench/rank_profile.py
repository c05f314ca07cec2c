"""Where a step's time goes: the kernels of one replay, by what they do in a layer.

Kernels are launched while the one before ends, and wait for it: a kernel's time is what it adds, from the end of
everything before it to its own end. So the classes' times sum up to the step's. What the profiler takes to launch the
graph stands between a step's first copy and its first kernel, and is left out.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

SAME = {"linear_held": "_linear"}  # forms of one op
NORMED = "linear_normed"  # a norm with the product behind it
NORM = "_add_rmsnorm"  # one before attention, one before the experts, one at the end
# What the launches of one name are, in their order within a segment.
KNOWN: dict[str, dict[str, tuple[str, ...]]] = {
    "attention": {"_linear": ("q_a + kv_a", "q_b", "W_UV", "o_proj")},
    "experts": {"_linear": ("shared gate_up + router", "shared down")},
    "end": {"_linear": ("lm_head",)},
}


class Event(NamedTuple):
    name: str
    start: float  # us
    us: float


class Profile(NamedTuple):
    """Of one step."""

    classes: dict[str, tuple[int, float]]  # launches and us
    span: float  # us from the first launch's begin to the last one's end, less what the profiler takes
    per_layer: float  # launches

    def as_dict(self) -> dict[str, Any]:
        classes = {name: {"launches": n, "us": round(us, 1)} for name, (n, us) in self.classes.items()}
        return {
            "span_us": round(self.span, 1), "launches_per_layer": round(self.per_layer, 2), "classes": classes,
        }  # fmt: skip

    def describe(self, title: str) -> str:
        found = sorted(self.classes.items(), key=lambda item: -item[1][1])
        lines = [
            f"  {us:9.1f} us {100 * us / self.span:5.1f} %  {n:5} x {us / n:7.2f}  {name}" for name, (n, us) in found
        ]
        head = f"profile {title}: {self.span:.0f} us, {self.per_layer:.1f} launches a layer"
        return "\n".join([head, *lines])


def profile(launch: Callable[[], object], layers: int) -> Profile:
    """One replay under torch's profiler, which adds some tenths of a us to each launch."""
    for _ in range(3):
        launch()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as made:
        launch()
        torch.cuda.synchronize()
    events = [
        Event(event.name, event.time_range.start, event.time_range.elapsed_us())
        for event in made.events() or ()
        if event.device_type.name == "CUDA"
    ]
    return classified(sorted(events, key=lambda event: event.start), layers)


def classified(events: Sequence[Event], layers: int) -> Profile:
    """Names are told apart by the segment they are in: launches of `NORM` divide a step into attention and experts of
    each layer, and what is before and behind them."""
    totals = defaultdict[str, list[float]](lambda: [0, 0.0])
    segment, norms, seen = "begin", 0, dict[str, int]()
    done, late = events[0].start if events else 0.0, 0.0
    for event in events:
        name = short(event.name)
        name = SAME.get(name, name)
        if NORM in name or name == NORMED:
            norms += 1
            segment = "end" if norms > 2 * layers else "attention" if norms % 2 else "experts"
            seen.clear()
            label = "add + norm"
            if name == NORMED:
                seen["_linear"] = 1
                label += f" + {KNOWN[segment]['_linear'][0]}"
        else:
            place = seen[name] = seen.get(name, 0) + 1
            known = KNOWN.get(segment, {}).get(name, ())
            label = known[place - 1] if place <= len(known) else f"{segment}: {name}"
        total = totals[label]
        if segment == "begin":
            late += max(0.0, event.start - done)
            done = max(done, event.start)
        total[0] += 1
        total[1] += max(0.0, event.start + event.us - done)
        done = max(done, event.start + event.us)
    span = done - events[0].start - late if events else 0.0
    inner = sum(int(n) for label, (n, _) in totals.items() if not label.startswith(("begin", "end", "lm_head")))
    return Profile({label: (int(n), us) for label, (n, us) in totals.items()}, span, inner / layers)


def short(name: str) -> str:
    """A kernel's own name, without its arguments and templates."""
    return re.sub(r"[<(].*", "", name.removeprefix("void ")).strip()[:60]
