"""Which hosts share the ranks of a group, by the configuration."""

from __future__ import annotations

from hedgerow.engine.rank_door import Split
from hedgerow.engine.rank_wire import LEAST_SECRET
from hedgerow.rpc.config import ConfigError, variable_of
from services.verifier.config import VerifierServiceConfig


def split_of(config: VerifierServiceConfig) -> Split:
    """The ranks and their hosts. Raises ConfigError with what does not fit, before anything loads."""
    split = Split(config.tensor_parallel, config.group_hosts)
    if config.group_host >= split.hosts:
        raise _refuse("group_host", config.group_host, f"must be below HEDGEROW_GROUP_HOSTS, {split.hosts}")
    if split.hosts == 1:
        return split
    if split.ranks % split.hosts:
        raise _refuse("tensor_parallel", split.ranks, f"must be a multiple of HEDGEROW_GROUP_HOSTS, {split.hosts}")
    if len(config.group_secret) < LEAST_SECRET:
        raise _refuse(
            "group_secret", "the value", f"must have at least {LEAST_SECRET} characters, the same on all hosts"
        )
    field = "group_leader" if config.group_host else "group_listen"
    host, _, port = (getattr(config, field) or "").rpartition(":")
    if not (host and port.isdecimal() and int(port) < 1 << 16):
        raise _refuse(field, repr(getattr(config, field)), "must be host:port, on a host of several")
    return split


def _refuse(field: str, value: object, limit: str) -> ConfigError:
    return ConfigError(variable_of(field), str(value), limit)
