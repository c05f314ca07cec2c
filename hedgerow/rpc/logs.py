"""Structured logs: one line an event, `key=value`, on stderr.

    log = get_log(__name__)
    log.warning("redis is away", address=url, retry_in=0.5)
    time=2026-01-02T03:04:05.678Z level=warning service=kvstore event="redis is away" address=... retry_in=0.5

Prompts, tokens and secrets are never logged.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time

LEVELS = ("debug", "info", "warning", "error")
_PLAIN = re.compile(r"^[^\s\"=]+$")


class Log:
    """A logger whose events have fields."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, event: str, **fields: object) -> None:
        """For whoever debugs this program."""
        self._emit(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        """A change of state that an operator may want to see."""
        self._emit(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Something failed and the program copes."""
        self._emit(logging.WARNING, event, fields)

    def error(self, event: str, *, exception: BaseException | None = None, **fields: object) -> None:
        """Something failed that should not; `exception` adds its traceback as one field."""
        self._emit(logging.ERROR, event, fields, exception)

    def _emit(self, level: int, event: str, fields: dict[str, object], exception: BaseException | None = None) -> None:
        if self._logger.isEnabledFor(level):
            # The event is an argument, so that a % in it is not taken for a format.
            self._logger.log(level, "%s", event, extra={"fields": fields}, exc_info=exception)


def get_log(name: str) -> Log:
    """The log of a module."""
    return Log(logging.getLogger(name))


def set_up_logging(service: str, level: str = "info") -> None:
    """Send every log record of this process to stderr in one format. `level` is one of LEVELS."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_LineFormatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    logging.captureWarnings(True)


class _LineFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self.service = service

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        pairs: dict[str, object] = {
            "time": f"{clock}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self.service,
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[1] is not None:
            pairs["traceback"] = self.formatException(record.exc_info)
        return " ".join(f"{key}={_quote(str(value))}" for key, value in pairs.items())


def _quote(text: str) -> str:
    return text if _PLAIN.match(text) else json.dumps(text, ensure_ascii=False)
