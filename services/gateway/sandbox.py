"""A model folder's own chat template, rendered where it can do no harm, for who asks for it.

The template is a text of strangers. It runs in Jinja's immutable sandbox, in a process without environment
(`sandbox_worker.py`), bounded in time, memory and output. Its result is cut at the names of special tokens, which
become ids where the template wrote them; what a user wrote is marked beforehand, so that no such name in it, nor one
that begins or ends in it, is taken for one.
"""

from __future__ import annotations

import json
import math
import os
import re
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from hedgerow import strict_json
from hedgerow.errors import InvalidRequest, Unavailable
from hedgerow.small_files import read_small
from services.gateway.declarations import Inexpressible, typescript
from services.gateway.history import checked
from services.gateway.members import FOLDER
from services.gateway.tokenizer import Tokenizer, TokenizerError, read_json
from services.gateway.tools import declared
from services.gateway.types import Chat, Message

WORKER = Path(__file__).with_name("sandbox_worker.py")
TEMPLATE_BYTES, TEXT_BYTES, SECONDS = 1 << 18, 64 << 20, 5.0
START_SECONDS = 30.0  # the first answer: an interpreter starts, on a machine that may be busy
NAMES = ("properties", "patternProperties", "$defs", "definitions")  # their keys are a user's, not JSON Schema's
# Noncharacters: no text needs one, and a template does nothing with them. One that no user wrote is the mark.
MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))


class FolderTemplate:
    """`quick` is false: it waits for another process. Used by one thread at a time; others wait."""

    name, quick = FOLDER, False

    def __init__(self, source: str, tokenizer: Tokenizer, default_thinking: bool) -> None:
        self.tokenizer, self._thinks = tokenizer, default_thinking
        self._specials = re.compile("|".join(map(re.escape, sorted(tokenizer.special_names, key=len, reverse=True))))
        self._begins = re.compile(f"[{re.escape(''.join({name[0] for name in tokenizer.special_names}))}]")
        self._worker = Worker(source)
        self._lock = threading.Lock()

    @classmethod
    def from_folder(cls, folder: Path, tokenizer: Tokenizer, default_thinking: bool) -> FolderTemplate:
        """`chat_template.jinja`, or the key `chat_template` of `tokenizer_config.json`. Raises TokenizerError."""
        path = folder / "chat_template.jinja"
        try:
            source: Any = read_small(path).decode() if path.exists() else None
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(path, f"no text: {error}") from error
        if source is None:
            path = folder / "tokenizer_config.json"
            source = read_json(path).get("chat_template")
        if not isinstance(source, str) or not source:
            raise TokenizerError(path, "HEDGEROW_CHAT_TEMPLATE=folder, and there is no chat template")
        if len(source.encode()) > TEMPLATE_BYTES:
            raise TokenizerError(path, f"a chat template of more than {TEMPLATE_BYTES} bytes")
        if short := [name for name in tokenizer.special_names if len(name) < 2]:
            raise TokenizerError(
                folder / "tokenizer_config.json", f"{short[0]!r} as a special token's name is any text"
            )
        template = cls(source, tokenizer, default_thinking)
        if why := template._worker.start():
            raise TokenizerError(path, f"the chat template: {why}")
        return template

    def render(self, chat: Chat) -> list[int]:
        """See `Template`. Raises InvalidRequest where the template refuses, or takes too much."""
        messages, tools = checked(chat.messages), declared(chat.tools_json)
        mark = next((each for each in MARKS if not _anywhere(each, chat)), None)
        if mark is None:
            found = "text with every noncharacter from U+FDD0 to U+FDEF"
            raise InvalidRequest("chat.messages", found, "text without one of them")
        marked = self._marker(mark)
        seen: dict[str, Any] = {
            "messages": [_seen(message, marked) for message in messages],
            "tools": _everywhere(tools, marked) if tools else None,
            "add_generation_prompt": True,
            "thinking": self._thinks if chat.thinking is None else chat.thinking,
            "preserve_thinking": bool(chat.preserve_thinking),
        }
        if declaration := _declaration(tools):
            seen["tools_ts_str"] = marked(declaration)
        with self._lock:
            text = self._worker.render(seen)
        ids: list[int] = []
        at = 0
        for name in self._specials.finditer(text):
            ids += self.tokenizer.encode(text[at : name.start()].replace(mark, ""))
            ids.append(self.tokenizer.special(name[0]))
            at = name.end()
        return ids + self.tokenizer.encode(text[at:].replace(mark, ""))

    def close(self) -> None:
        """End the process."""
        self._worker.close()

    def _marker(self, mark: str) -> Callable[[str], str]:
        """Marks a user's text: behind every character that may begin a special token's name, and at both ends.

        Outer whitespace stays outermost: templates trim it, and no name has any.
        """

        def marked(text: str) -> str:
            inner = text.strip()
            if not inner:
                return text
            before, after = text[: text.index(inner)], text[text.index(inner) + len(inner) :]
            return f"{before}{mark}{self._begins.sub(lambda found: found[0] + mark, inner)}{mark}{after}"

        return marked


def _seen(message: Message, marked: Callable[[str], str]) -> dict[str, Any]:
    """A message as templates know it: OpenAI's form."""
    seen: dict[str, Any] = {"role": message.role, "content": marked(message.content)}
    if message.name:
        seen["name"] = marked(message.name)
    if message.role == "assistant" and message.reasoning:
        seen["reasoning_content"] = seen["reasoning"] = marked(message.reasoning)
    if message.tool_calls:
        seen["tool_calls"] = [
            {
                "id": marked(call.id),
                "type": "function",
                "function": {"name": marked(call.name), "arguments": marked(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.role == "tool":
        seen["tool_call_id"] = marked(message.tool_call_id)
    return seen


def _declaration(tools: list[dict[str, Any]]) -> str:
    """The tools as TypeScript. The published tokenizers of K2.5 and K2.6 hand it to their templates under the name
    `tools_ts_str`, which then take it for the tools' JSON; "" where there are none, or where it cannot say them.
    """
    try:
        return typescript(tools) if tools else ""
    except Inexpressible:
        return ""


def _everywhere(value: Any, marked: Callable[[str], str], *, named: bool = False) -> Any:
    """Texts of a tool, marked; and keys, where they are names or no words: templates ask for the others."""
    if isinstance(value, dict):
        return {
            marked(key) if named or not re.fullmatch(r"[\w$-]*", key) else key: _everywhere(
                each, marked, named=not named and key in NAMES
            )
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [_everywhere(each, marked) for each in value]
    return marked(value) if isinstance(value, str) and value != "function" else value


def _anywhere(mark: str, chat: Chat) -> bool:
    escaped = f"\\u{ord(mark):04x}"
    return escaped in chat.tools_json.lower() or any(mark in text for text in (chat.tools_json, *_texts(chat)))


def _texts(chat: Chat) -> Iterable[str]:
    for message in chat.messages:
        yield from (message.name, message.content, message.reasoning, message.tool_call_id)
        for call in message.tool_calls:
            yield from (call.id, call.name, call.arguments)


class Worker:
    """The process that renders. It is started anew after it had to be ended."""

    def __init__(self, source: str, seconds: float = SECONDS, command: Sequence[str] = ()) -> None:
        self._source, self._seconds = source, seconds
        self._command = list(command) or [sys.executable, "-I", str(WORKER)]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> str:
        """Start it with the template; what is wrong with that, or ""."""
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={})
        told = {"template": self._source, "seconds": math.ceil(self._seconds) + 1}
        why = self._asked(told, START_SECONDS).get("error", "")
        if why:
            self.close()
        return why

    def render(self, seen: dict[str, Any]) -> str:
        """The template's text. Raises InvalidRequest; Unavailable where the process cannot be started."""
        if self._process is None and (why := self.start()):
            raise Unavailable("the chat template", why)
        answer = self._asked(seen, self._seconds)
        if "text" not in answer:
            limit = f"one that the folder's template takes: {answer['error']}"
            raise InvalidRequest("chat", "this conversation", limit)
        return answer["text"]

    def close(self) -> None:
        """End it, whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _asked(self, request: dict[str, Any], seconds: float) -> dict[str, str]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        deadline, parts, size = time.monotonic() + seconds, list[bytes](), 0
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")  # it reads before it does anything
            process.stdin.flush()
            with selectors.DefaultSelector() as waiting:
                waiting.register(process.stdout, selectors.EVENT_READ)
                while not parts or not parts[-1].endswith(b"\n"):
                    if not waiting.select(max(0.0, deadline - time.monotonic())):
                        return self._given_up(f"it takes more than {seconds:g} s")
                    parts.append(os.read(process.stdout.fileno(), 1 << 20))
                    size += len(parts[-1])
                    if not parts[-1]:
                        return self._given_up("its process ended")
                    if size > TEXT_BYTES:
                        return self._given_up(f"it writes more than {TEXT_BYTES} bytes")
        except BrokenPipeError:
            return self._given_up("its process ended")
        try:
            answer = strict_json.loads(b"".join(parts))
        except ValueError as error:
            return self._given_up(f"it answers no JSON: {error}")
        if not isinstance(answer, dict) or not all(isinstance(text, str) for text in answer.values()):
            return self._given_up("it answers something else than texts by name")
        return answer

    def _given_up(self, why: str) -> dict[str, str]:
        self.close()
        return {"error": why}
