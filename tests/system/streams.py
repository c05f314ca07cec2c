"""Clients that ask for the same generations again and again while a cluster is disturbed: a process for `lab exec`.

    python -m tests.system.streams ADDRESS --streams 4 --tokens 400

Each client has a prompt and a seed of its own, so each of its answers must be its first one, token for token. What
happens is told as JSON lines: {"undisturbed": true} once every client has its first answer, then {"running": n}
whenever the first token of an answer came, and at the end, which comes when standard input is closed, a summary. An
answer of another fingerprint is compared with the first one of that.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
import time
from collections import Counter
from typing import NamedTuple

from hedgerow.client import AsyncClient, Retry
from hedgerow.errors import HedgerowError

PROMPTS = ("def read_config(path):", "class Queue:\n", "import os\n\ndef walk(", "def fibonacci(n):", "async def main(")
# Of calls that have given nothing yet: a cluster whose only verifier restarts has no gateway that is ready.
RETRY = Retry(attempts=200, resumes=200, last_delay=1.0, total=180.0)


class Answer(NamedTuple):
    """A whole one."""

    fingerprint: str
    tokens: tuple[int, ...]


class Clients:
    """What they did, together."""

    def __init__(self, address: str, tokens: int, retry: Retry = RETRY) -> None:
        self.address, self.tokens, self.retry = address, tokens, retry
        self.done = self.wrong = self.running = 0
        self.longest = 0.0  # seconds between two chunks of one answer
        self.errors: list[str] = []
        self.first: dict[int, Answer] = {}
        self.later: dict[tuple[int, str], Answer] = {}  # the first ones of other fingerprints
        self.fingerprints: Counter[str] = Counter()  # answers
        self.current: Counter[str] = Counter()  # streams that have begun
        self.at_once = 0  # most fingerprints of streams that ran at one time
        self.stopping = asyncio.Event()

    async def run(self, count: int) -> None:
        """Until standard input is closed, and then until each answer has come to its end."""
        async with AsyncClient(self.address, retry=self.retry) as client:
            first = await asyncio.gather(*(self.answer(client, number) for number in range(count)))
            self.first.update(enumerate(first))
            tell(undisturbed=True)
            # A thread: standard input may be a pipe that no event loop takes.
            reading = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
            reading.add_done_callback(lambda task: self.stopping.set())
            await asyncio.gather(*(self.repeat(client, number) for number in range(count)))
        told = {"done": self.done, "wrong": self.wrong, "errors": self.errors, "longest": round(self.longest, 2)}
        tell(**told, fingerprints=self.fingerprints, at_once=self.at_once)

    async def repeat(self, client: AsyncClient, number: int) -> None:
        """One client. An answer with an error is not asked for again at once: it would be the next error."""
        while not self.stopping.is_set():
            try:
                answer = await self.answer(client, number)
            except HedgerowError as error:
                self.errors.append(f"{error.reason}: {error.message}")
                await asyncio.sleep(1)
                continue
            self.done += 1
            self.fingerprints[answer.fingerprint] += 1
            expected = self.first[number]
            if answer.fingerprint != expected.fingerprint:
                expected = self.later.setdefault((number, answer.fingerprint), answer)
            self.wrong += answer != expected

    async def answer(self, client: AsyncClient, number: int) -> Answer:
        """One, read to its end."""
        tokens: list[int] = []
        options = {"max_tokens": self.tokens, "temperature": 0.8, "seed": 100 + number, "ignore_eos": True}
        stream = client.generate(PROMPTS[number % len(PROMPTS)], **options)  # type: ignore[arg-type]
        fingerprint, last = "", 0.0
        try:
            async for chunk in stream:
                now = time.monotonic()
                if fingerprint:
                    self.longest = max(self.longest, now - last)
                elif chunk.tokens:
                    assert stream.started is not None
                    fingerprint = stream.started.fingerprint
                    self.running += 1
                    self.current[fingerprint] += 1
                    self.at_once = max(self.at_once, len(+self.current))
                    tell(running=self.running)
                tokens += chunk.tokens
                last = now
        finally:
            self.running -= bool(fingerprint)
            self.current[fingerprint] -= bool(fingerprint)
        return Answer(fingerprint, tuple(tokens))


def tell(**what: object) -> None:
    """One line."""
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--attempts", type=int, default=RETRY.attempts)
    given = parser.parse_args()
    retry = dataclasses.replace(RETRY, attempts=given.attempts)
    asyncio.run(Clients(given.address, given.tokens, retry).run(given.streams))
