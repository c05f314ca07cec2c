"""A service's configuration as it is now: the environment's, with what a file says of the fields that may change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from hedgerow.rpc.config import overlaid
from hedgerow.rpc.reload import Reloads
from hedgerow.watched import Watched

LIMITS = "limits"


class HasLimits(Protocol):
    """A configuration that may name a file. It is a dataclass."""

    @property
    def limits_file(self) -> Path | None:
        """HEDGEROW_NAME=value lines; None: there is none."""


Config = TypeVar("Config", bound=HasLimits)


class Live(Generic[Config]):
    """`reloads` are this process's files that change, to which others may be added. Raises ConfigError."""

    def __init__(self, config: Config) -> None:
        self.reloads = Reloads()
        self._began, self._file = config, self._watched(config)
        self._applied, self._appliers = self.config, list[Callable[[Config], None]]()

    @property
    def config(self) -> Config:
        """Of the last look at the file."""
        return self._began if self._file is None else self._file.held

    def on_change(self, apply: Callable[[Config], None]) -> None:
        """`apply` each other configuration, within a second."""
        self._appliers.append(apply)

    def apply(self) -> None:
        """The configuration of now, if that is another one."""
        config = self.config
        if config != self._applied:
            self._applied = config
            for apply in self._appliers:
                apply(config)

    def _watched(self, config: Config) -> Watched[Config] | None:
        path = config.limits_file
        return None if path is None else self.reloads.watch(LIMITS, path, lambda: overlaid(config, path))
