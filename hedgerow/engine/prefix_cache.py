"""Pages of prompts that have been computed, for prompts that begin alike.

A page whose positions are all of a prompt is written by path P alone, whose bits depend on nothing but the tokens up to
it (DESIGN, "Exactness"); so whoever has the same tokens has the same page. Its key is a chained SHA-256 of them, which
is believed. Output is never kept, and a prompt's last row is always computed: it draws the first token.

The cache is a holder of its pages like a sequence. A sequence holds every page that it shares, from the first on; so
what only the cache holds has no descendant that a sequence needs, and pages let go last first are given back children
before parents.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import torch

from hedgerow.engine.config import EngineConfig
from hedgerow.engine.features import FeatureRing
from hedgerow.engine.kv_cache import PagePool
from hedgerow.engine.sequence import AttachedSequence, Phase
from hedgerow.engine.types import PrefixLoad
from hedgerow.errors import InvariantViolation


def chain(tenant: str, prompt: Sequence[int], page_size: int) -> tuple[bytes, ...]:
    """A key for each whole page of the prompt, of all tokens up to its end. Another tenant's differ in every one."""
    key, data = hashlib.sha256(b"hedgerow prefix of " + tenant.encode()).digest(), array("I", prompt).tobytes()
    width, keys = page_size * array("I").itemsize, list[bytes]()
    for begin in range(0, len(data) - width + 1, width):
        key = hashlib.sha256(key + data[begin : begin + width]).digest()
        keys.append(key)
    return tuple(keys)


class PrefixCache:
    """Shares pages of `pool` among sequences. For one thread; its counts may be read from any.

    Nobody waits for what only the cache holds: `reserve` gives such pages back, the longest unused first.
    """

    def __init__(self, config: EngineConfig, pool: PagePool) -> None:
        self._pool, self._sharing = pool, config.prefix_cache
        self._ring = config.feature_ring if config.max_budget else 0
        self._kept: dict[bytes, int] = {}  # pages by their keys
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # of those that only the cache holds; first to go first
        self._features: OrderedDict[bytes, torch.Tensor] = OrderedDict()  # [page size, width]; first to go first
        self._most_bytes, self._feature_bytes = config.prefix_feature_bytes, 0
        self._growing: dict[
            AttachedSequence, None
        ] = {}  # those whose prompts are not whole here, as they were admitted
        self._queried = self._hit = self._reclaimed = 0

    def load(self) -> PrefixLoad:
        """What it holds and counts."""
        return PrefixLoad(self._queried, self._hit, len(self._kept), self._feature_bytes, self._reclaimed)

    @property
    def available(self) -> int:
        """Pages that nobody holds, or only the cache."""
        return self._pool.free + len(self._idle)

    def needed(self, sequence: AttachedSequence) -> int:
        """Pages that the sequence takes of the available ones when it is admitted."""
        whole = self._pool.pages_for(sequence.slots)
        if whole <= self.available:
            return whole
        return whole - sum(key not in self._idle for key in self._found(sequence))

    def admit(self, sequence: AttachedSequence) -> None:
        """Gives the sequence its pages: what is known of its prompt, and as many as it can need beside."""
        found = self._found(sequence)
        pages = self._take(found)
        rest = self.reserve(self._pool.pages_for(sequence.slots) - len(pages))
        assert rest is not None, "admissible and not admitted"
        sequence.admit((*pages, *rest))
        if self._sharing != "off":
            self._queried += len(sequence.start.prompt)
        if self._ring and self._most_bytes and sequence.features is None and sequence.keys:
            # of a sequence without trees too: another one of the same prompt may have some
            sequence.features = FeatureRing(min(self._ring, len(sequence.start.prompt)))
        self._join(sequence, found)

    def follow(self) -> None:
        """Lets sequences go on where another one has got to meanwhile, with the same prompt."""
        for sequence in list(self._growing):
            if sequence.phase is Phase.PREFILLING and sequence.cached % self._pool.page_size == 0:
                self._follow(sequence)

    def publish(self) -> None:
        """Keeps what is final of the running sequences' prompts: the steps before are over."""
        for sequence in list(self._growing):
            self._publish(sequence)

    def _follow(self, sequence: AttachedSequence) -> None:
        if not (found := self._found(sequence)):
            return
        begin, end = sequence.shared, sequence.shared + len(found)
        pages = self._take(found)
        self._pool.release(sequence.pages[begin:end])
        sequence.pages = (*sequence.pages[:begin], *pages, *sequence.pages[end:])
        self._join(sequence, found)

    def _publish(self, sequence: AttachedSequence) -> None:
        keys, size = sequence.keys or (), self._pool.page_size
        begin, end = sequence.shared, min(sequence.cached // size, len(keys))
        if begin >= end:
            return
        pages = list(sequence.pages)
        for n in range(begin, end):
            if keys[n] not in self._kept:
                self._kept[keys[n]] = pages[n]
                self._pool.share(pages[n : n + 1])
            elif self._kept[keys[n]] != pages[n]:  # written twice, in one step: the bits are the same
                self._pool.release(pages[n : n + 1])
                pages[n : n + 1] = self._take(keys[n : n + 1])
            self._note_features(keys[n], sequence.features, n * size)
        sequence.pages = tuple(pages)
        self._shared(sequence, end)

    def release(self, sequence: AttachedSequence) -> None:
        """The sequence is over: it holds nothing any more, and what is final of its prompt is kept."""
        self._publish(sequence)
        self._growing.pop(sequence, None)
        self._pool.release(sequence.pages)
        for key in reversed((sequence.keys or ())[: sequence.shared]):
            if self._pool.holders(self._kept[key]) == 1:
                self._idle[key] = None
        sequence.pages, sequence.keys, sequence.shared = (), None, 0

    def reserve(self, pages: int) -> tuple[int, ...] | None:
        """As the pool's, but what only the cache holds makes room where pages are lacking."""
        lacking = pages - self._pool.free
        if lacking > len(self._idle):
            return None
        for _ in range(lacking):
            self._drop(next(iter(self._idle)))
            self._reclaimed += 1
        return self._pool.reserve(pages)

    def clear(self) -> None:
        """Keeps nothing that no sequence holds: what was computed is not believed any more."""
        while self._idle:
            self._drop(next(iter(self._idle)))

    @property
    def pages(self) -> Iterable[int]:
        """Those that it holds."""
        return self._kept.values()

    def check(self, running: Iterable[AttachedSequence]) -> None:
        """InvariantViolation where what it says of its pages and of the sequences' is not so."""
        alone = {key for key, page in self._kept.items() if self._pool.holders(page) == 1}
        if alone != set(self._idle):
            raise InvariantViolation(f"{len(self._idle)} kept pages count as idle and {len(alone)} are")
        for sequence in running:
            for key, page in zip((sequence.keys or ())[: sequence.shared], sequence.pages, strict=False):
                if self._kept.get(key) != page:
                    raise InvariantViolation(f"page {page} counts as shared and is not", metadata={"page": page})
        held = sum(rows.nbytes for rows in self._features.values())
        if held != self._feature_bytes or not self._features.keys() <= self._kept.keys():
            raise InvariantViolation(f"{self._feature_bytes} bytes of features count as kept and {held} are")

    def _found(self, sequence: AttachedSequence) -> Sequence[bytes]:
        """Keys of the pages behind those that the sequence shares which are here; never the one with its last row."""
        size, prompt = self._pool.page_size, sequence.start.prompt
        if sequence.keys is None:
            tenant = sequence.start.tenant if self._sharing == "tenant" else ""
            sequence.keys = () if self._sharing == "off" else chain(tenant, prompt, size)
        end, most = sequence.shared, min((len(prompt) - 1) // size, len(sequence.keys))
        while end < most and sequence.keys[end] in self._kept:
            end += 1
        return sequence.keys[sequence.shared : end]

    def _take(self, keys: Sequence[bytes]) -> list[int]:
        """One more holds the pages of these keys."""
        pages = [self._kept[key] for key in keys]
        self._pool.share(pages)
        for key in keys:
            self._idle.pop(key, None)
        return pages

    def _join(self, sequence: AttachedSequence, found: Sequence[bytes]) -> None:
        """These pages are the sequence's next ones. Features are read where its ring can hold them."""
        size, ring = self._pool.page_size, sequence.features
        reach = -(-ring.capacity // size) if ring is not None else 0
        unread = max(len(found) - reach, 0)
        for key in found[unread:]:
            if key in self._features:
                self._features.move_to_end(key)
        sequence.find([None] * unread + [self._features.get(key) for key in found[unread:]], size)
        self._hit += len(found) * size
        self._shared(sequence, sequence.shared + len(found))

    def _shared(self, sequence: AttachedSequence, pages: int) -> None:
        sequence.shared = pages
        if pages < len(sequence.keys or ()):
            self._growing[sequence] = None
            return
        self._growing.pop(sequence, None)
        if not sequence.budget:
            sequence.features = None

    def _note_features(self, key: bytes, ring: FeatureRing | None, begin: int) -> None:
        size = self._pool.page_size
        if ring is None or key in self._features or not ring.holds(begin, size):
            return
        rows = self._features[key] = ring.read(begin, size).clone()
        self._feature_bytes += rows.nbytes
        while self._feature_bytes > self._most_bytes:
            self._feature_bytes -= self._features.popitem(last=False)[1].nbytes

    def _drop(self, key: bytes) -> None:
        del self._idle[key]
        self._pool.release((self._kept.pop(key),))
        if (rows := self._features.pop(key, None)) is not None:
            self._feature_bytes -= rows.nbytes
