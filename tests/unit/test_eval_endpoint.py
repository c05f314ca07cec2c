"""The HTTP client of `hedgerow eval`, against a real server on this machine that behaves as servers do, and worse."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from hedgerow.cli.evaluation import endpoint as module
from hedgerow.cli.evaluation.endpoint import Endpoint
from hedgerow.cli.main import main
from hedgerow.errors import DeadlineExceeded, HedgerowError, Internal, InvalidRequest, Unavailable
from tests.evaluation_answers import RIGHT, wrong

Act = Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]


@contextmanager
def served(*acts: Act) -> Iterator[tuple[str, list[tuple[str, dict[str, Any], str]]]]:
    """A server's URL, and (path, body, authorization) of what it was asked; the last act answers all that follows."""
    asked: list[tuple[str, dict[str, Any], str]] = []
    left, turn = list(acts), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with turn:
                asked.append((self.path, body, self.headers.get("Authorization", "")))
                act = left.pop(0) if len(left) > 1 else left[0]
            try:
                act(self, body)
            except OSError:
                self.close_connection = True

        def log_message(self, *arguments: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def send(handler: BaseHTTPRequestHandler, status: int, data: bytes, **headers: str) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


def answering(text: str | None, finish: str | None = "stop") -> Act:
    def act(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        choice = {"text": text} if "prompt" in body else {"message": {"role": "assistant", "content": text}}
        said = {"choices": [choice | {"finish_reason": finish}], "usage": {"completion_tokens": 5}}
        send(handler, 200, json.dumps(said).encode())

    return act


def failing(status: int, message: str, **headers: str) -> Act:
    return lambda handler, body: send(handler, status, json.dumps({"error": {"message": message}}).encode(), **headers)


def raw(data: bytes, status: int = 200) -> Act:
    return lambda handler, body: send(handler, status, data)


def test_a_chat_and_a_completion() -> None:
    with served(answering("hé")) as (url, asked):
        endpoint = Endpoint(url + "/", "m", api_key="k")
        assert endpoint.chat("hello", {"max_tokens": 7}) == ("hé", "stop", 5)
        assert endpoint.complete("def f", {}).text == "hé"
    chat = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": False, "max_tokens": 7}
    assert asked == [
        ("/v1/chat/completions", chat, "Bearer k"),
        ("/v1/completions", {"model": "m", "prompt": "def f", "stream": False}, "Bearer k"),
    ]


def test_an_answer_of_reasoning_alone_is_empty() -> None:
    with served(answering(None, None)) as (url, _):
        assert Endpoint(url, "m").chat("x", {}) == ("", "", 5)


def test_an_answer_in_parts_is_their_text() -> None:
    """As some servers write what reasons; and the whole has no code in what was thought."""
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"type": "text", "text": "a"}, 7]
    said = {"choices": [{"message": {"content": [*parts, {"type": "text", "text": "b"}]}, "finish_reason": "stop"}]}
    with served(raw(json.dumps(said).encode())) as (url, _):
        assert Endpoint(url, "m").chat("x", {}) == ("ab", "stop", None)


def test_a_stream_that_nobody_asked_for_is_named() -> None:
    data = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\ndata: [DONE]\n\n'
    with served(raw(data)) as (url, _), pytest.raises(Internal, match="no JSON: 'data: "):
        Endpoint(url, "m").chat("x", {})


@pytest.mark.parametrize("status", [400, 401, 404, 422, 500, 301])
def test_an_error_is_told_with_its_message_and_not_repeated(status: int) -> None:
    with served(failing(status, "no such model")) as (url, asked):
        with pytest.raises(Internal, match=rf"{status}.*no such model"):
            Endpoint(url, "m").chat("x", {})
        assert len(asked) == 1


@pytest.mark.parametrize("status", [429, 502, 503])
def test_a_busy_server_is_asked_again(status: int) -> None:
    with served(failing(status, "later", Retry_After="0"), answering("ok")) as (url, asked):
        assert Endpoint(url, "m").chat("x", {}).text == "ok"
        assert len(asked) == 2


def test_a_server_that_stays_busy_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LONGEST_PAUSE", 0.01)
    with served(failing(503, "full", Retry_After="9999")) as (url, asked):
        with pytest.raises(Unavailable, match=r"503.*full"):
            Endpoint(url, "m").chat("x", {})
        assert len(asked) == module.TRIES


def test_a_pause_longer_than_the_time_left_is_not_waited_for() -> None:
    with served(failing(503, "full", Retry_After="20")) as (url, asked):
        began = time.monotonic()
        with pytest.raises(Unavailable):
            Endpoint(url, "m", seconds=5).chat("x", {})
        assert time.monotonic() - began < 4
        assert len(asked) == 1


def silent(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    threading.Event().wait(3)


def dripping(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    """A byte every now and then: no single read times out."""
    handler.send_response(200)
    handler.send_header("Content-Length", "100000")
    handler.end_headers()
    for _ in range(60):
        handler.wfile.write(b" ")
        threading.Event().wait(0.05)


def dripping_headers(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
    for _ in range(60):
        handler.wfile.write(b"y")
        threading.Event().wait(0.05)


@pytest.mark.parametrize("act", [silent, dripping, dripping_headers])
def test_a_slow_server_is_left_at_the_deadline(act: Act) -> None:
    with served(act) as (url, _):
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"within 0\.4 s"):
            Endpoint(url, "m", seconds=0.4).chat("x", {})
        assert time.monotonic() - began < 2.9, "the server had given up first"


def huge(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    """Chunks without an end, and no length that gives it away."""
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    while True:
        handler.wfile.write(b"100000\r\n" + b" " * 0x100000 + b"\r\n")


def test_a_huge_answer_is_left() -> None:
    with served(huge) as (url, asked):
        with pytest.raises(Internal, match=f"longer than {module.MOST_BYTES}"):
            Endpoint(url, "m", seconds=30).chat("x", {})
        assert len(asked) == 1


def cut(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices"')
    handler.close_connection = True


def test_a_connection_that_breaks_is_tried_again() -> None:
    with served(cut, answering("whole")) as (url, asked):
        assert Endpoint(url, "m").chat("x", {}).text == "whole"
        assert len(asked) == 2


@pytest.mark.parametrize(
    "data",
    [b"<html>", b"", b"[]", b"{}", b'{"choices": []}', b'{"choices": [{"text": "for completions"}]}', b"null",
     b'{"choices": [null]}', b'{"choices": "x"}', b"[" * 100_000],
)  # fmt: skip
def test_nonsense_is_named(data: bytes) -> None:
    with served(raw(data)) as (url, _), pytest.raises(Internal, match=r"no JSON|no choice"):
        Endpoint(url, "m").chat("x", {})


def test_nobody_there() -> None:
    with pytest.raises(HedgerowError, match="refused"):
        Endpoint("http://127.0.0.1:1/v1", "m", seconds=1.5).chat("x", {})


@pytest.mark.parametrize("url", ["", "localhost:80", "ftp://h/v1", "http://", "http://h:99999/", "http://h/v1?x=1"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="--endpoint"):
        Endpoint(url, "m")


def solving(name_of: dict[str, str]) -> Act:
    """Answers each task with `name_of` its stub's first line; a request with plain decoding gets the wrong answer."""

    def act(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        question = body["messages"][0]["content"]
        name = next(name for name in RIGHT if f"def {name}(" in question or f"class {name}:" in question)
        code = wrong(name) if name == "clockwise" and body.get("budget") == 0 else RIGHT[name]
        answering(f"<think>hm</think>Here:\n```python\n{code}```")(handler, body)

    return act


def test_eval_of_an_endpoint(capsys: pytest.CaptureFixture[str]) -> None:
    with served(solving({})) as (url, asked):
        assert main(["eval", "--endpoint", url, "--model", "m", "--no-thinking", "--body", '{"top_k": 3}']) == 0
    out = capsys.readouterr().out
    assert f"pass@1 served: {len(RIGHT)} of {len(RIGHT)} (1.000)" in out
    assert "same text" not in out
    assert all(body["top_k"] == 3 and body["chat_template_kwargs"] == {"thinking": False} for _, body, _ in asked)


def test_eval_tells_where_plain_decoding_differs(capsys: pytest.CaptureFixture[str]) -> None:
    with served(solving({})) as (url, _):
        arguments = ["eval", "--endpoint", url, "--model", "m", "--plain-body", '{"budget": 0}', "--json"]
        assert main([*arguments, "--task", "clockwise", "--task", "to_roman"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["passed"] == {"trees": 2, "plain": 1}
    assert found["pass_at_1"] == {"trees": 1.0, "plain": 0.5}
    assert found["same_text"] == {"compared": 2, "same": 1}
    clockwise, to_roman = found["tasks"]
    assert (clockwise["task"], clockwise["same"], clockwise["plain"]["failure"]) == ("clockwise", False, "wrong answer")
    assert (to_roman["same"], to_roman["trees"]["passed"], to_roman["trees"]["tokens"]) == (True, True, 5)
    assert "seccomp" in found["isolation"]


def test_eval_counts_what_was_not_answered(capsys: pytest.CaptureFixture[str]) -> None:
    with served(failing(400, "no")) as (url, _):
        assert main(["eval", "--endpoint", url, "--model", "m", "--task", "to_roman"]) == 1
    told = capsys.readouterr()
    assert "failed (no answer)" in told.out
    assert "1 questions had no answer" in told.err
