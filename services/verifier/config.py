"""Configuration of the verifier service."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hedgerow.rpc.computing import ComputingConfig
from hedgerow.rpc.config import ConfigError, variable_of

IN_PROCESS = "in-process"
MOST_BUDGET = 4096
"""No operator allows more, so no session anywhere was admitted with more."""


@dataclass(frozen=True, kw_only=True)
class VerifierServiceConfig(ComputingConfig):
    """What `python -m services.verifier` takes, as HEDGEROW_<FIELD>."""

    model_path: Path = field(metadata={"help": "folder of the checkpoint"})
    model_name: str = field(metadata={"min": 1, "max": 128, "help": "name under which the model is served"})
    health_listen: str | None = field(
        default=None,
        metadata={
            "address": True,
            "help": "address at which a process of its own, without the model and without a device, answers health as "
            "well, also while this one hangs; TLS as on the admin port; empty: none",
        },
    )
    drafter: str | None = field(
        default=None,
        metadata={
            "address": True,
            "help": "address of the drafter; in-process: drafter_path's, which is then computed here; empty: plain "
            "decoding",
        },
    )
    feature_layers: str = field(
        default="", metadata={"max": 1024, "help": "the drafter's target layers, as 1,2,3; empty: the drafter is asked"}
    )
    features: str = field(
        default="auto",
        metadata={
            "choices": ("auto", "hidden", "projected", "tokens"),
            "help": "what the drafter is sent: the target's hidden states; those after the drafter's fc, which is "
            "applied here; the tokens. auto: hidden where feature_layers are given, else what the drafter says",
        },
    )
    drafter_path: Path | None = field(
        default=None,
        metadata={
            "help": "folder of the drafter's checkpoint, whose fc is applied where projected, or all where in-process"
        },
    )
    trees: str = field(
        default="auto",
        metadata={
            "choices": ("auto", "conditional", "marginal"),
            "help": "of a drafter in this process, as of one in its own",
        },
    )
    yarn_amplitude: float | None = field(
        default=None, metadata={"min": 0.1, "max": 10.0, "help": "of a drafter in this process, as of one in its own"}
    )
    acceptance_least: float = field(
        default=0.9,
        metadata={
            "min": 0.0,
            "max": 1.0,
            "help": "share of the acceptance on a drafter's card that it must reach once it is connected, or a warning "
            "says that it does not; without a card, of the best with the layers beside its own; 0: it is not measured",
        },
    )
    default_budget: int = field(
        default=8,
        metadata={"min": 0, "max": MOST_BUDGET, "help": "most nodes of a tree, for a request that does not say"},
    )
    auto_budget: int = field(
        default=0,
        metadata={
            "min": 0,
            "max": MOST_BUDGET,
            "help": "above 0: a tree of a request that does not say has up to so many nodes, chosen in each step by "
            "what steps have taken and trees have brought; default_budget is not used then",
        },
    )
    max_budget: int = field(
        default=63, metadata={"min": 0, "max": MOST_BUDGET, "help": "the most that a request may ask for"}
    )
    tensor_parallel: int = field(
        default=1,
        metadata={
            "min": 1,
            "max": 64,
            "help": "ranks that share the model, a process each; where device is cuda, a GPU each, else engine auto is "
            "torch above 1. A rank that dies or hangs ends the verifier, which comes back with all of them",
        },
    )
    group_hosts: int = field(
        default=1,
        metadata={"min": 1, "max": 64, "help": "hosts that share the ranks, as many on each; each runs a verifier"},
    )
    group_host: int = field(
        default=0,
        metadata={
            "min": 0,
            "max": 63,
            "help": "which of them this one is. The first serves; the others run their ranks for it, and serve nobody",
        },
    )
    group_listen: str | None = field(
        default=None,
        metadata={
            "address": True,
            "help": "host:port at which the first host of several lets the others in; mutual TLS where tls_cert is "
            "given",
        },
    )
    group_leader: str | None = field(
        default=None,
        metadata={
            "address": True,
            "help": "host:port by which the others reach it, for which its certificate must be; the first one takes no "
            "notice",
        },
    )
    group_address: str | None = field(
        default=None,
        metadata={
            "address": True,
            "help": "address of this host for the ranks of the others; empty: the one between it and the first host",
        },
    )
    group_secret: str = field(
        default="",
        metadata={
            "help": "what the hosts of a group prove to each other that they have, the same on all: 16 characters or "
            "more",
            "secret": True,
        },
    )
    max_sequences: int = field(default=32, metadata={"min": 1, "max": 65536, "help": "sequences in the running batch"})
    max_waiting: int = field(default=256, metadata={"min": 0, "max": 1 << 20, "help": "sequences behind it"})
    cache_pages: int | None = field(
        default=None,
        metadata={
            "min": 1,
            "max": 1 << 31,
            "help": "pages of the latent cache, 64 tokens each; empty: by the other limits and by free memory",
        },
    )
    prefix_cache: str = field(
        default="tenant",
        metadata={
            "choices": ("tenant", "shared", "off"),  # the engine's SHARING, which is not imported: it loads torch
            "help": "whose prompts share what was computed of them, where they begin alike: those of one tenant, of "
            "all tenants, or nobody's",
        },
    )
    prefix_feature_bytes: int = field(
        default=1 << 28,
        metadata={
            "min": 0,
            "max": 1 << 40,
            "help": "bytes of features kept with it, for the drafter; a prompt whose features are gone is drafted from "
            "less context, with the same tokens",
        },
    )
    prefill_rows: int = field(default=256, metadata={"min": 1, "max": 65536, "help": "prompt rows in one step"})
    prefill_factor: float | None = field(
        default=None,
        metadata={
            "min": 0.0,
            "max": 1000.0,
            "help": "times a step without prompts that one with them may take where sequences decode, as measured; "
            "prompts then get fewer rows than prefill_rows. At least 1; 0: no limit; empty: 3 on CPUs, 1.8 on a GPU",
        },
    )
    calibration_ms: int = field(
        default=2000,
        metadata={
            "min": 0,
            "max": 60_000,
            "help": "most time that measuring steps takes at the first start, for predictions until later ones are "
            "measured; what it finds is kept in a file, which the next start reads. 0: neither",
        },
    )
    calibration_path: Path | None = field(
        default=None,
        metadata={
            "help": "folder of that file; empty: the one of the compiled engine or, where that cannot be written, "
            "hedgerow-UID below the temporary one"
        },
    )
    run_ahead: int = field(
        default=512, metadata={"min": 1, "max": 1 << 20, "help": "tokens that the store may be behind a sequence"}
    )
    draft_timeout_ms: int = field(
        default=500, metadata={"min": 1, "max": 60_000, "help": "longest wait of a step for its trees"}
    )
    outgoing_messages: int = field(
        default=1024, metadata={"min": 1, "max": 1 << 20, "help": "unsent messages at which a slow gateway is cut off"}
    )
    orphan_ms: int = field(
        default=10_000,
        metadata={
            "min": 0,
            "max": 600_000,
            "help": "how long sequences outlive their gateway's stream: a lease and more, for its next owner",
        },
    )

    @property
    def hosts_drafter(self) -> bool:
        """Whether the drafter is computed in this process."""
        return self.drafter == IN_PROCESS

    @property
    def prefill_factor_used(self) -> float:
        """`prefill_factor`, or the device's: on a GPU few rows cost little more than their share, on CPUs much more."""
        if self.prefill_factor is not None:
            return self.prefill_factor
        return 1.8 if self.device == "cuda" else 3.0

    @property
    def layers(self) -> tuple[int, ...]:
        """`feature_layers` as numbers. Raises ConfigError."""
        try:
            return tuple(int(layer) for layer in self.feature_layers.split(",") if layer.strip())
        except ValueError:
            raise ConfigError(
                variable_of("feature_layers"),
                repr(self.feature_layers),
                "must be layer numbers with commas between them",
            ) from None
