"""What the services that hold a model take beside a server's configuration."""

from __future__ import annotations

from dataclasses import dataclass, field

from hedgerow.rpc.server import ServerConfig
from hedgerow.scheduling import usable_cores


@dataclass(frozen=True, kw_only=True)
class ComputingConfig(ServerConfig):
    """How this process computes."""

    engine: str = field(
        default="auto",
        metadata={
            "choices": ("auto", "compiled", "torch"),
            "help": "on a CPU, what computes: C compiled for it, torch, or (auto) torch where C does not work",
        },
    )
    device: str = field(
        default="cpu",
        metadata={"choices": ("cpu", "cuda"), "help": "where the model is computed; cuda: the first CUDA device"},
    )
    threads: int | None = field(
        default=None,
        metadata={
            "min": 1,
            "max": 256,
            "help": "most threads of one forward pass, used while they pay; empty: the cores, at most 2",
        },
    )

    @property
    def threads_used(self) -> int:
        """`threads`, or what this process may use for them."""
        return self.threads or min(2, usable_cores())
