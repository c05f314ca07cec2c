"""Pages of prompts are shared by whoever has the same tokens, and nobody waits for a page that nobody needs."""

from __future__ import annotations

import pytest

from hedgerow.engine.config import EngineConfig
from hedgerow.engine.prefix_cache import chain
from hedgerow.engine.sequence import Phase
from hedgerow.errors import InvalidRequest, InvariantViolation
from tests.prefix_machine import RING, SIZE, Machine, sequence, text

# What is shared


@pytest.mark.parametrize(("length", "hit"), [(4, 0), (5, 4), (8, 4), (9, 8), (11, 8), (12, 8), (13, 12)])
def test_whole_pages_hit_and_the_last_row_is_always_computed(length: int, hit: int) -> None:
    machine = Machine(32)
    machine.run(sequence(text(length)))
    second = sequence(text(length))
    assert machine.run(second) == length - hit + 3
    assert second.usage().cached_prompt_tokens == hit
    assert machine.prefixes[:3] == (2 * length, hit, length // SIZE)


def test_output_is_never_shared() -> None:
    """Path D writes it: a chat's last answer is computed again, all before it hits."""
    machine, asked = Machine(32), text(10)
    machine.run(sequence(asked, output=9))
    following = sequence([*asked, *[7] * 9, 1, 2])
    machine.run(following)
    assert following.found == 8
    again = sequence([*asked, *[7] * 9, 1, 2])
    machine.run(again)
    assert again.found == 20


def test_a_sequence_that_is_built_anew_hits_its_prompt_and_replays_its_output() -> None:
    machine = Machine(32)
    machine.run(sequence(text(20), output=9))
    rebuilt = sequence(text(20), output=9, committed=6)
    assert machine.run(rebuilt) == 4 + 5 + 3
    assert rebuilt.found == 16


def test_what_differs_in_one_token_shares_nothing_from_there_on() -> None:
    machine, asked = Machine(32), text(20)
    machine.run(sequence(asked))
    for changed, hit in ((0, 0), (3, 0), (4, 4), (11, 8), (19, 16)):
        other = sequence([*asked[:changed], 15, *asked[changed + 1 :]])
        machine.run(other)
        assert other.found == hit, changed


def test_a_page_can_be_shared_once_the_step_that_writes_it_is_over() -> None:
    """Of equal prompts in one queue the first is computed, and the others take from it step by step."""
    machine = Machine(64, prefill_rows=8)
    group = [sequence(text(20), output=2) for _ in range(4)]
    machine.add(*group)
    machine.step()
    assert [each.cached for each in group] == [8, 0, 0, 0]
    machine.scheduler.schedule()
    assert [each.cached for each in group] == [8, 8, 8, 8]
    assert {each.pages[:2] for each in group} == {group[0].pages[:2]}
    machine.scheduler.check()
    assert machine.run() == (8 + 4) + 3 * 4 + 4  # the prompt once, the last page of each, a row a second token
    assert [each.found for each in group] == [0, 16, 16, 16]


def test_what_two_write_in_one_step_is_kept_once() -> None:
    machine = Machine(64, prefill_rows=64)
    group = [sequence(text(18)) for _ in range(3)]
    machine.add(*group)
    machine.step()
    machine.step()
    assert len({each.pages[:4] for each in group}) == 1
    held = {page for each in group for page in each.pages}
    assert machine.scheduler.prefixes.available == 64 - len(held)
    machine.run()


@pytest.mark.parametrize(("mode", "hits"), [("tenant", [0, 16, 0, 16, 0]), ("shared", [0, 16, 16, 16, 16])])
def test_tenants_share_only_with_themselves_unless_all_may(mode: str, hits: list[int]) -> None:
    machine = Machine(64, prefix_cache=mode)
    found = []
    for tenant in ("a", "a", "b", "a", ""):
        each = sequence(text(18), tenant=tenant)
        machine.run(each)
        found.append(each.found)
    assert found == hits


def test_switched_off_nothing_is_kept() -> None:
    machine = Machine(64, prefix_cache="off")
    for _ in range(2):
        assert machine.run(sequence(text(18))) == 18 + 3
    assert machine.prefixes == (0, 0, 0, 0, 0)
    assert machine.scheduler.pool.free == 64


def test_a_mode_that_there_is_not_names_itself() -> None:
    with pytest.raises(InvalidRequest, match="one of tenant, shared, off"):
        EngineConfig(prefix_cache="everybody")


def test_keys_are_whole_digests_of_everything_before() -> None:
    keys = chain("t", text(4096), 64)
    assert (len(keys), {len(key) for key in keys}) == (64, {32})
    assert len({*keys, *chain("u", text(4096), 64), *chain("", text(4096), 64)}) == 3 * 64
    assert chain("t", text(4096)[:130], 64) == keys[:2]
    assert chain("t", text(63), 64) == ()


# Memory


def test_nobody_waits_or_is_refused_because_pages_are_kept() -> None:
    machine = Machine(8)
    for seed in range(5):
        machine.run(sequence(text(16, seed)))
    assert machine.scheduler.pool.free < 8
    assert machine.scheduler.prefixes.available == 8
    largest = sequence(text(28, 99), output=5)
    assert machine.scheduler.pool.pages_for(largest.slots) == 8
    assert machine.run(largest) == 28 + 4
    assert machine.prefixes[4] >= 8


def test_the_longest_unused_goes_first_and_children_go_before_their_parents() -> None:
    machine = Machine(8)
    old, new = text(12, 1), text(12, 2)
    for prompt in (old, new, old):  # three pages each, and one for the output
        machine.run(sequence(prompt))
    machine.run(sequence(text(12, 3)))  # needs four of eight, of which two are free
    probes = {}
    for name, prompt in (("old", old), ("new", new)):
        keys = chain("", prompt, SIZE)
        probes[name] = [key in machine.scheduler.prefixes._kept for key in keys]
    assert probes == {"old": [True] * 3, "new": [True, False, False]}


def test_prompts_that_share_are_admitted_together_where_each_alone_would_fill_the_cache() -> None:
    machine = Machine(12, prefill_rows=64)
    machine.run(sequence(text(36)))
    group = [sequence(text(36)) for _ in range(3)]  # nine pages and one, of which eight hit
    machine.add(*group)
    machine.scheduler.schedule()
    assert [each.phase for each in group] == [Phase.PREFILLING] * 2 + [Phase.WAITING]
    machine.scheduler.check()
    machine.run()


def test_a_cancel_in_the_middle_of_a_prompt_leaves_what_it_computed() -> None:
    machine = Machine(16, prefill_rows=10)
    left, stays = sequence(text(30)), sequence(text(30), output=2)
    machine.add(left, stays)
    machine.step()
    machine.scheduler.remove(left)
    machine.scheduler.check()
    assert machine.run() == 30 - 8 + 1
    assert stays.found == 8


def test_a_wrong_count_is_found() -> None:
    machine = Machine(16)
    machine.run(sequence(text(12)))
    machine.scheduler.pool.share(list(machine.scheduler.prefixes.pages)[:1])
    with pytest.raises(InvariantViolation):
        machine.scheduler.check()


# Features


@pytest.mark.parametrize("budget", [0, 8])
def test_a_hit_brings_the_features_that_its_ring_can_hold(budget: int) -> None:
    """Those of a sequence without trees are kept too: the next one may have some."""
    machine = Machine(64, prefill_rows=8)
    machine.run(sequence(text(30), budget=budget))
    second = sequence(text(30), budget=8)
    machine.add(second)
    machine.scheduler.schedule()
    assert second.features is not None
    assert (second.features.start, second.features.end) == (28 - RING, 28)
    machine.read(second)
    machine.run()


def test_a_sequence_without_trees_lets_its_features_go_with_its_prompt() -> None:
    machine = Machine(64, prefill_rows=8)
    plain = sequence(text(20), output=9)
    machine.add(plain)
    machine.step()
    assert plain.features is not None
    while plain.phase is not Phase.DECODING:
        machine.step()
    machine.step()
    assert plain.features is None


def test_features_are_bounded_and_a_missing_one_only_means_a_later_start() -> None:
    page = SIZE * 4  # bytes, of rows of one number
    machine = Machine(64, prefix_feature_bytes=2 * page + 1)
    machine.run(sequence(text(20), budget=8))
    assert machine.prefixes[3] == 2 * page
    second = sequence(text(30, 5), budget=8)
    machine.run(second)
    first = sequence(text(20), budget=8)
    machine.add(first)
    machine.scheduler.schedule()
    assert first.features is not None
    assert (first.cached, first.features.start, first.features.end) == (16, 16, 16)
    machine.run()
