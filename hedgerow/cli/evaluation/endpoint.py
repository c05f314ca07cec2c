"""A thin client of OpenAI-compatible HTTP: one question, one whole answer, with bounds on time, size and repeats."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from hedgerow import strict_json
from hedgerow.errors import DeadlineExceeded, HedgerowError, Internal, InvalidRequest, Overloaded, Unavailable

MOST_BYTES = 8 << 20  # of an answer
LONGEST_PAUSE = 30.0  # seconds between two tries, whatever a server asks for
TRIES = 4
BUSY = (408, 429, 502, 503, 504)
SHOWN = 300  # characters of what a server says


class Said(NamedTuple):
    """What an endpoint answered."""

    text: str
    finish_reason: str
    completion_tokens: int | None


@dataclass(frozen=True)
class Endpoint:
    """`url` is that of the API, as `http://127.0.0.1:8000/v1`. `seconds` bound a question with all its tries.

    Raises InvalidRequest for a URL that is none; HedgerowError, by what went wrong, from the calls.
    """

    url: str
    model: str
    api_key: str = ""
    seconds: float = 600.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        try:
            port_is_one = parts.port is None or parts.port > 0
        except ValueError:
            port_is_one = False
        if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_one or parts.query:
            raise InvalidRequest("--endpoint", self.url, "a URL such as http://127.0.0.1:8000/v1")
        if not self.model:
            raise InvalidRequest("--model", self.model, "given: an endpoint serves it by this name")

    def chat(self, message: str, fields: Mapping[str, Any]) -> Said:
        """Answers one user's message. `fields` are added to the request."""
        asked = {"model": self.model, "messages": [{"role": "user", "content": message}], "stream": False, **fields}
        return _said(self._post("/chat/completions", asked), lambda choice: choice["message"]["content"])

    def complete(self, prompt: str, fields: Mapping[str, Any]) -> Said:
        """Continues a text."""
        asked = {"model": self.model, "prompt": prompt, "stream": False, **fields}
        return _said(self._post("/completions", asked), lambda choice: choice["text"])

    def _post(self, path: str, asked: Mapping[str, Any]) -> Any:
        """Tries again what a busy server or a broken connection refused, within `seconds`."""
        end, pause, last = time.monotonic() + self.seconds, 0.5, None
        for _ in range(TRIES):
            try:
                return self._once(path, json.dumps(asked).encode(), end)
            except (Overloaded, Unavailable) as error:
                last = error
            wait = min(max(pause, last.retry_after or 0), LONGEST_PAUSE)
            if time.monotonic() + wait >= end:
                break
            time.sleep(wait)
            pause *= 2
        raise last or DeadlineExceeded(f"{self.url}: no answer within {self.seconds:g} s")

    def _once(self, path: str, body: bytes, end: float) -> Any:
        left = end - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"{self.url}: no answer within {self.seconds:g} s")
        connection = self._connection(left)
        # a server that sends a byte now and then passes every time-out of the socket, so a clock closes it
        clock = threading.Timer(left, _cut, (connection,))
        clock.start()
        try:
            connection.request("POST", urlsplit(self.url).path.rstrip("/") + path, body, self._headers())
            return _read(connection.getresponse())
        except (OSError, http.client.HTTPException, HedgerowError) as error:
            if time.monotonic() >= end - 0.01:  # whatever the cut looked like
                raise DeadlineExceeded(f"{self.url}: no answer within {self.seconds:g} s") from None
            if isinstance(error, HedgerowError):
                raise
            raise Unavailable(self.url, f"{type(error).__name__}: {error}") from None
        finally:
            clock.cancel()
            connection.close()

    def _connection(self, seconds: float) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        if parts.scheme == "https":
            return http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=seconds, context=ssl.create_default_context()
            )
        return http.client.HTTPConnection(parts.hostname, parts.port, timeout=seconds)

    def _headers(self) -> dict[str, str]:
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"Content-Type": "application/json", "Accept": "application/json", **key}


def _cut(connection: http.client.HTTPConnection) -> None:
    if connection.sock is not None:
        connection.sock.settimeout(0.001)
        try:
            connection.sock.shutdown(2)
        except OSError:
            return


def _read(response: http.client.HTTPResponse) -> Any:
    """The JSON of a good answer. Raises HedgerowError for any other; Unavailable and Overloaded may be tried again."""
    body = bytearray()
    while part := response.read1(1 << 16):
        body += part
        if len(body) > MOST_BYTES:
            raise Internal(f"the endpoint's answer is longer than {MOST_BYTES} bytes")
    if response.length:
        raise http.client.IncompleteRead(bytes(body[:0]), response.length)
    if response.status != 200:
        raise _refused(response, bytes(body))
    try:
        return strict_json.loads(body)
    except ValueError:
        raise Internal(f"the endpoint's answer is no JSON: {_shown(bytes(body))}") from None


def _refused(response: http.client.HTTPResponse, body: bytes) -> HedgerowError:
    try:
        said = str(strict_json.loads(body)["error"]["message"])[:SHOWN]
    except (ValueError, LookupError, TypeError):
        said = _shown(body)
    if response.status not in BUSY:
        return Internal(f"the endpoint answered {response.status} {response.reason}: {said}")
    try:
        after = max(0.0, float(response.headers.get("Retry-After", "")))
    except ValueError:
        after = 0.5
    return Unavailable("the endpoint", f"{response.status} {response.reason}: {said}", after)


def _said(answer: Any, text_of: Any) -> Said:
    try:
        choice = answer["choices"][0]
        text, reason = text_of(choice), choice.get("finish_reason")
    except (LookupError, TypeError, AttributeError):
        raise Internal(
            f"the endpoint's answer has no choice with a text: {_shown(json.dumps(answer).encode())}"
        ) from None
    if isinstance(text, list):  # parts, as some servers write what reasons
        text = "".join(part["text"] for part in text if isinstance(part, dict) and isinstance(part.get("text"), str))
    usage = answer.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return Said(
        text if isinstance(text, str) else "",  # null: all of it was reasoning, or a refusal
        reason if isinstance(reason, str) else "",
        tokens if isinstance(tokens, int) else None,
    )


def _shown(body: bytes) -> str:
    return repr(body[:SHOWN].decode("utf-8", "replace"))
