"""A thousand random lives of sequences, against a model that has no pages and counts nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from hedgerow.engine.prefix_cache import chain
from hedgerow.engine.sequence import AttachedSequence
from tests.prefix_machine import SIZE, Machine, sequence, text

Prefix = tuple[str, tuple[int, ...]]


class Model:
    """The same rules, with everything found anew each time from the tokens: no page has a number or a count here."""

    def __init__(self, pages: int, places: int) -> None:
        self.pages, self.places = pages, places
        self.running: dict[AttachedSequence, int] = {}  # positions that are final
        self.kept: dict[Prefix, int] = {}  # when it was let go
        self.now = self.given_back = 0

    @staticmethod
    def final(each: AttachedSequence, positions: int) -> list[Prefix]:
        prompt = tuple(each.start.prompt)
        return [(each.start.tenant, prompt[:end]) for end in range(SIZE, min(len(prompt), positions) + 1, SIZE)]

    def held(self) -> set[Prefix]:
        return {prefix for each, positions in self.running.items() for prefix in self.final(each, positions)}

    def idle(self) -> list[Prefix]:
        return sorted(self.kept.keys() - self.held(), key=self.kept.__getitem__)

    def free(self) -> int:
        own = sum(-(-each.slots // SIZE) - len(self.final(each, at)) for each, at in self.running.items())
        return self.pages - own - len(self.held() | self.kept.keys())

    def hits(self, each: AttachedSequence) -> list[Prefix]:
        found = list[Prefix]()
        for prefix in self.final(each, len(each.start.prompt) - 1):
            if prefix not in self.kept:
                break
            found.append(prefix)
        return found

    def schedule(self, waiting: Sequence[AttachedSequence]) -> None:
        self.kept = dict.fromkeys(self.held(), 0) | self.kept
        for each in waiting:
            whole, hits = -(-each.slots // SIZE), self.hits(each)
            room = self.free() + len(self.idle())
            if len(self.running) == self.places or whole - len(self.held() & set(hits)) > room:
                break
            lacking = whole - len(hits) - self.free()
            for prefix in [prefix for prefix in self.idle() if prefix not in hits][: max(lacking, 0)]:
                del self.kept[prefix]
                self.given_back += 1
            self.running[each] = len(hits) * SIZE
        for each, at in self.running.items():
            if at < len(each.start.prompt) and at % SIZE == 0:
                self.running[each] = max(at, len(self.hits(each)) * SIZE)

    def remove(self, each: AttachedSequence) -> None:
        final = self.final(each, self.running.pop(each))
        for prefix in reversed(final):
            self.now += 1
            self.kept[prefix] = 0 if prefix in self.held() else self.now


@pytest.mark.parametrize("part", range(4))
def test_a_thousand_random_lives_agree_with_the_model(part: int) -> None:
    hits = given_back = blocked = 0
    for seed in range(part * 250, part * 250 + 250):
        choose = random.Random(seed)
        pages = choose.randint(5, 16)
        machine = Machine(pages, prefill_rows=choose.choice((3, 8, 40)), max_sequences=4)
        s, model = machine.scheduler, Model(pages, 4)
        for _ in range(25):
            if choose.random() < 0.5:
                prompt = text(choose.randint(1, 16), choose.randint(0, 2))[: choose.randint(1, 16)]
                each = sequence(prompt, choose.randint(2, 4), choose.choice((0, 2)), choose.choice(("", "a")))
                machine.add(*[each] * (each.slots <= pages * SIZE))
            if choose.random() < 0.2 and (there := [*s.running, *s.waiting]):
                each = choose.choice(there)
                if each in model.running:
                    model.remove(each)
                s.remove(each)
            model.schedule(s.waiting)
            works = s.schedule()
            assert {each: each.cached for each in s.running} == model.running
            blocked += bool(s.waiting) and s.free_places > 0
            kept = {chain(*prefix, SIZE)[-1] for prefix in model.kept}
            assert kept == s.prefixes._kept.keys()
            assert s.pool.free == model.free()
            s.check()
            running = list(s.running)
            ended = machine.write(works)
            model.running |= {each: each.cached for each in running}
            for each in ended:
                model.remove(each)
        assert machine.prefixes[4] == model.given_back
        hits, given_back = hits + machine.prefixes[1], given_back + model.given_back
    assert min(hits, given_back, blocked) > 100, (hits, given_back, blocked)
