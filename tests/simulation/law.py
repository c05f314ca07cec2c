"""A model whose next token is a checksum of everything before it, and the shipped engine around it.

A verifier that is given one wrong token goes on wrongly ever after, so a lost, repeated or swapped token shows.
"""

from __future__ import annotations

import functools
import random
import struct
import zlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from hedgerow.engine.config import EngineConfig
from hedgerow.engine.rows import Part, Walk
from hedgerow.engine.sequence import Phase
from hedgerow.engine.types import Finish
from hedgerow.engine.verifier import Plan, VerifierEngine
from services.gateway.tokenizer import SPECIAL_TOKENS, Tokenizer

WORDS = ("the ", "sea", " and", "über", "ß", "日本", "🌱", "\n", "END")
CONTEXT = 256
PAGE = 16


@functools.cache
def tokenizer() -> Tokenizer:
    """Single bytes, a few words of several bytes, and the special tokens, of which the first one ends a text."""
    pieces = [bytes([byte]) for byte in range(256)] + [word.encode() for word in WORDS if len(word.encode()) > 1]
    ranks = {piece: rank for rank, piece in enumerate(pieces)}
    return Tokenizer(ranks, {"[EOS]": len(ranks)}, frozenset(range(len(ranks), len(ranks) + SPECIAL_TOKENS)))


@functools.cache
def eos() -> int:
    """The token that ends a text."""
    return tokenizer().special("[EOS]")


@functools.cache
def _choices() -> list[int]:
    words = [rank for rank, piece in enumerate(tokenizer().pieces) if len(piece) > 1]
    letters = list(b"abcdefgh ")
    halves = list("é🌱".encode())  # bytes that are no character of their own
    return letters * 2 + words + halves + [eos()]


def next_token(seed: int, prompt: Sequence[int], output: Sequence[int], variant: int = 0) -> int:
    """The token at offset `len(output)`. Another variant has another fingerprint, and goes another way now and then."""
    choices = _choices()
    if variant and zlib.crc32(struct.pack(f"<{len(output) + 1}I", *output, variant)) % 2:
        seed ^= variant
    state = zlib.crc32(struct.pack(f"<Q{len(prompt)}I{len(output)}I", seed, *prompt, *output))
    return choices[(state * 2654435761 >> 7) % len(choices)]


KERNEL_LAWS = ("law-1", "law-2")
"""The variants' names, as fingerprints have them."""


class Truth(NamedTuple):
    """What an undisturbed run gives."""

    tokens: tuple[int, ...]
    finish: Finish


class Asked(NamedTuple):
    """What decides a session's tokens."""

    seed: int
    prompt: tuple[int, ...]
    max_tokens: int
    stop: tuple[str, ...]
    ignore_eos: bool


def end_of(asked: Asked, output: Sequence[int]) -> Finish:
    """Why it ends with this output; NONE: it does not. By rules written again here: the engine's are under test."""
    text = b"".join(tokenizer().pieces[token] for token in output)
    if output and output[-1] == eos() and not asked.ignore_eos:
        return Finish.STOP
    if any(end.encode() in text for end in asked.stop):
        return Finish.STOP
    return Finish.LENGTH if len(output) == asked.max_tokens else Finish.NONE


@functools.lru_cache(4096)
def truth(asked: Asked, variant: int = 0) -> Truth:
    """The whole output."""
    output: list[int] = []
    while not (finish := end_of(asked, output)):
        output.append(next_token(asked.seed, asked.prompt, output, variant))
    return Truth(tuple(output), finish)


class LawModel:
    """What the engine asks of a model, without arithmetic."""

    checkpoint_hash, architecture = "law", "law"
    feature_layers: tuple[int, ...] = ()
    feature_width = 0

    def __init__(self, variant: int = 0) -> None:
        self.kernel_law = KERNEL_LAWS[variant]
        self.config: Any = SimpleNamespace(
            vocab_size=tokenizer().vocab_size, max_position_embeddings=CONTEXT, eos_token_ids=(eos(),)
        )
        self.walk: Any = None

    def new_cache(self, pages: int) -> Any:
        """Nothing is kept."""
        return SimpleNamespace(pages=pages, page_size=PAGE, copy=lambda sources, targets: None)

    def forward(self, rows: Any, cache: Any) -> Any:
        """The law needs no rows."""
        return None, None


class LawEngine(VerifierEngine):
    """The shipped engine; only the arithmetic of a step is the law's. Steps emit 1 to `most` tokens."""

    def __init__(
        self,
        limits: EngineConfig,
        chance: random.Random,
        most: int,
        generated: Callable[[str, int], None],
        variant: int = 0,
    ) -> None:
        vocabulary, self._variant = tuple(tokenizer().pieces), variant
        super().__init__(LawModel(variant), limits, vocabulary, frozenset((eos(),)))
        self._chance, self._most, self._generated = chance, most, generated

    def _accept(self, plan: Plan, parts: list[Part], done: Any) -> None:
        for part in parts:
            work = part.work
            sequence, path, tokens = work.sequence, list(range(work.rows)), list[int]()
            if part.drawn is not None:
                wanted = self._chance.randint(1, self._most) if work.phase is Phase.DECODING else 1
                start = sequence.start
                for _ in range(wanted):
                    before = [*sequence.output, *tokens]
                    tokens.append(next_token(start.sampling.seed, start.prompt, before, self._variant))
                tokens = sequence.truncate(tokens)
                if work.phase is Phase.DECODING:
                    path = list(range(len(tokens)))
            sequence.keep(SimpleNamespace(shape=(len(path), 0)))  # type: ignore[arg-type]
            if tokens:
                self._generated(sequence.start.session_id, len(sequence.output) + len(tokens))
                self._emit(plan, part, Walk(path, tokens, len(tokens) - 1), len(path))
