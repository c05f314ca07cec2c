"""Structured logs: one line an event, on stderr, as `key=value` or as JSON with the same keys.

    log = get_log(__name__)
    log.warning("redis is away", address=url, retry_in=0.5)
    time=2026-01-02T03:04:05.678Z level=warning service=kvstore event="redis is away" address=... retry_in=0.5

What is about a call has its `trace` and `session`, also where the code that tells it knows neither: see `bind`. What is
about a step has its number as `step`; about many sessions, the names of some as `sessions`.
Prompts, tokens and secrets are never logged.
"""

from __future__ import annotations

import contextvars
import json
import logging
import re
import sys
import time

LEVELS = ("debug", "info", "warning", "error")
FORMS = ("text", "json")
_PLAIN = re.compile(r"^[^\s\"=]+$")


_BOUND: contextvars.ContextVar[dict[str, object]] = contextvars.ContextVar("hedgerow_log", default={})  # noqa: B039


def bind(**fields: object) -> None:
    """Fields of every event from here on in this task, and in those that it starts; "" takes one away."""
    _BOUND.set({key: value for key, value in (_BOUND.get() | fields).items() if value != ""})


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


def set_up_logging(service: str, level: str = "info", form: str = "text") -> None:
    """Send every log record of this process to stderr in one form, of FORMS. `level` is one of LEVELS."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(service) if form == "json" else _LineFormatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    logging.captureWarnings(True)


def set_level(level: str) -> None:
    """From now on; one of LEVELS."""
    logging.getLogger().setLevel(level.upper())


class _LineFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self.service = service

    def pairs(self, record: logging.LogRecord) -> dict[str, object]:
        """What there is to say of it."""
        clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        pairs: dict[str, object] = {
            "time": f"{clock}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self.service,
            "event": record.getMessage(),
            **_BOUND.get(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[1] is not None:
            pairs["traceback"] = self.formatException(record.exc_info)
        return pairs

    def format(self, record: logging.LogRecord) -> str:
        return " ".join(f"{key}={_quote(str(value))}" for key, value in self.pairs(record).items())


class _JsonFormatter(_LineFormatter):
    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(self.pairs(record), ensure_ascii=False, default=str)


def _quote(text: str) -> str:
    return text if _PLAIN.match(text) else json.dumps(text, ensure_ascii=False)
