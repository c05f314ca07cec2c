"""One judge for all faults: what a client got in the end equals the undisturbed run, token for token, byte for byte."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from hedgerow import digest


@dataclass(frozen=True)
class Heard:
    """One chunk as it came: `moment` in seconds of a monotonic clock, offsets as the event carried them."""

    moment: float
    token_offset: int
    text_offset: int
    tokens: tuple[int, ...]
    text: str
    digest: bytes


@dataclass
class Transcript:
    """Everything that one client got of one session, over all its calls."""

    name: str
    prompt: Sequence[int] = ()
    session_id: str = ""
    first_digest: bytes = b""
    heard: list[Heard] = field(default_factory=list)
    finishes: list[str] = field(default_factory=list)  # the reason, once a terminal event
    end: tuple[int, int, bytes] | None = None  # token offset, text offset and digest of that event
    exact: bool = True
    error: BaseException | None = None  # what made the client give up
    resumes: list[str] = field(default_factory=list)  # why each further call was made

    @property
    def tokens(self) -> list[int]:
        """The client's sequence: what it had, and what each chunk brought behind it."""
        return [token for chunk in self.heard for token in chunk.tokens]

    @property
    def text(self) -> str:
        """The client's text."""
        return "".join(chunk.text for chunk in self.heard)

    def silence(self, since: float) -> float:
        """Seconds of the longest wait for the next chunk that ended after `since`."""
        moments = [chunk.moment for chunk in self.heard]
        gaps = [later - max(earlier, since) for earlier, later in itertools.pairwise(moments)]
        return max((gap for gap in gaps if gap > 0), default=0.0)


@dataclass(frozen=True)
class Undisturbed:
    """What the client must get."""

    tokens: Sequence[int]
    text: str
    finish: str


@dataclass
class Verdict:
    """Tokens lost, duplicated and different over all clients of a run, and everything else that is wrong, in words."""

    lost: int = 0
    duplicated: int = 0
    different: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """Nothing is wrong."""
        return not (self.lost or self.duplicated or self.different or self.problems)

    def add(self, other: Verdict) -> None:
        """Joins another client's verdict."""
        self.lost += other.lost
        self.duplicated += other.duplicated
        self.different += other.different
        self.problems += other.problems


def judge(got: Transcript, must: Undisturbed) -> Verdict:
    """The verdict over one client. Offsets and digests are checked chunk by chunk, against what the client had."""
    verdict = Verdict()

    def wrong(what: str) -> None:
        verdict.problems.append(f"{got.name}: {what}")

    if got.error is not None:
        wrong(f"gave up with {type(got.error).__name__}: {got.error} after {got.resumes}")
    _judge_chunks(got, verdict, wrong)
    tokens = got.tokens
    verdict.different += sum(mine != right for mine, right in zip(tokens, must.tokens, strict=False))
    verdict.lost += max(0, len(must.tokens) - len(tokens))
    verdict.duplicated += max(0, len(tokens) - len(must.tokens))
    if got.text != must.text:
        wrong(f"its text has {len(got.text)} characters, not the {len(must.text)} of the undisturbed run, or others")
    if got.finishes != [must.finish]:
        wrong(f"it ended with {got.finishes}, not once with {must.finish!r}")
    here = (len(tokens), len(got.text.encode()), digest.extend(got.first_digest, tokens))
    if got.end is not None and got.end != here:
        wrong(f"its end says {got.end}, and it had {here}")
    if not got.exact:
        wrong("it was best effort")
    return verdict


def _judge_chunks(got: Transcript, verdict: Verdict, wrong: object) -> None:
    assert callable(wrong)
    if got.first_digest != digest.first(got.session_id, got.prompt):
        wrong("the digest at offset 0 is not that of its id and prompt")
    at, bytes_at, chain = 0, 0, got.first_digest
    for chunk in got.heard:
        if chunk.token_offset > at:
            verdict.lost += chunk.token_offset - at
            wrong(f"tokens {at} to {chunk.token_offset} were left out")
        elif chunk.token_offset < at:
            verdict.duplicated += at - chunk.token_offset
            wrong(f"tokens from {chunk.token_offset} came again at {at}")
        if chunk.text_offset != bytes_at:
            wrong(f"text at byte {chunk.text_offset} came at byte {bytes_at}")
        at, bytes_at = chunk.token_offset + len(chunk.tokens), chunk.text_offset + len(chunk.text.encode())
        chain = digest.extend(chain, chunk.tokens)
        if chunk.digest != chain:
            wrong(f"the digest at {at} is not that of the tokens before it")
            chain = chunk.digest  # one wrong digest is one finding
