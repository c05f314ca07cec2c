"""Asks the tasks, twice where plain decoding can be asked for, and judges the answers."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from hedgerow.cli.evaluation import answers
from hedgerow.cli.evaluation.endpoint import Endpoint
from hedgerow.cli.evaluation.sandbox import Limits, judge
from hedgerow.cli.evaluation.task import Task
from hedgerow.client import Client, Options
from hedgerow.errors import HedgerowError, Unauthenticated

TREES, PLAIN = "trees", "plain"


@dataclass(frozen=True)
class Answer:
    """What was written for one task by one way of decoding."""

    text: str
    finish_reason: str
    tokens: int | None  # generated; None: the endpoint does not say
    same_as: str  # equal for equal outputs: a hash of the token ids where they are known, else of the text


@dataclass(frozen=True)
class Outcome:
    """An answer and what it is worth. `failure` is "" for code that passed."""

    passed: bool
    failure: str
    detail: str
    seconds: float  # until the answer was there
    answer: Answer | None  # None: there was none


Asks = Callable[[Task], Answer]


@dataclass(frozen=True)
class Row:
    """A task and its outcome by way of decoding."""

    task: str
    outcomes: Mapping[str, Outcome]

    @property
    def same(self) -> bool | None:
        """Whether both ways wrote the same; None where there are not two answers."""
        found = [outcome.answer for outcome in self.outcomes.values()]
        if len(found) < 2 or any(answer is None for answer in found):
            return None
        return len({answer.same_as for answer in found if answer is not None}) == 1


def through_sdk(client: Client, options: Options, *, completion: bool, thinking: bool | None) -> Asks:
    """Asks a gateway of ours."""

    def ask(task: Task) -> Answer:
        if completion:
            stream = client.generate(answers.opening(task), **options)
        else:
            stream = client.chat([{"role": "user", "content": answers.question(task)}], thinking=thinking, **options)
        result = stream.result()
        return Answer(result.text, result.finish_reason, len(result.tokens), _hash(repr(list(result.tokens))))

    return ask


def through_http(endpoint: Endpoint, fields: Mapping[str, Any], *, completion: bool) -> Asks:
    """Asks any OpenAI-compatible endpoint."""

    def ask(task: Task) -> Answer:
        said = (
            endpoint.complete(answers.opening(task), fields)
            if completion
            else endpoint.chat(answers.question(task), fields)
        )
        return Answer(said.text, said.finish_reason, said.completion_tokens, _hash(said.text))

    return ask


def evaluate(
    tasks: Sequence[Task],
    ways: Mapping[str, Asks],
    *,
    completion: bool,
    limits: Limits,
    isolate: bool,
    parallel: int,
) -> list[Row]:
    """A row a task, in their order. What goes wrong with one answer is that answer's failure."""
    code_of = answers.code_of_completion if completion else answers.code_of_chat

    def outcome(task: Task, ask: Asks) -> Outcome:
        began = time.monotonic()
        try:
            answer = ask(task)
        except Unauthenticated:
            raise  # no answer would be another
        except HedgerowError as error:
            return Outcome(False, "no answer", str(error), time.monotonic() - began, None)
        seconds = time.monotonic() - began
        code = code_of(task, answer.text)
        if not code:
            return Outcome(False, "no code", answer.text[-200:], seconds, answer)
        verdict = judge(code, task.calls, task.driver, limits, isolate)
        return Outcome(verdict.passed, verdict.failure, verdict.detail, seconds, answer)

    with ThreadPoolExecutor(parallel, "eval") as pool:
        asked = [{way: pool.submit(outcome, task, ask) for way, ask in ways.items()} for task in tasks]
        try:
            return [
                Row(task.name, {way: future.result() for way, future in futures.items()})
                for task, futures in zip(tasks, asked, strict=True)
            ]
        except BaseException:  # Ctrl-C: what is under way ends by its own limits, the rest is not begun
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
