"""The page pool counts every page's holders and never loses one."""

from __future__ import annotations

import random

import pytest

from hedgerow.engine.kv_cache import PagePool
from hedgerow.errors import InvariantViolation


def test_a_reservation_takes_neighbouring_pages_where_it_can() -> None:
    pool = PagePool(pages=8, page_size=64)
    first, second = pool.reserve(3), pool.reserve(2)
    assert (first, second) == ((0, 1, 2), (3, 4))
    pool.release(first or ())
    assert pool.reserve(2) == (0, 1)
    assert pool.reserve(3) == (5, 6, 7)


def test_scattered_pages_serve_when_no_run_is_free() -> None:
    pool = PagePool(pages=5, page_size=64)
    singles = [pool.reserve(1) for _ in range(5)]
    for pages in (singles[0], singles[2], singles[4]):
        pool.release(pages or ())
    assert pool.reserve(3) == (0, 2, 4)
    assert pool.free == 0


def test_a_reservation_that_does_not_fit_takes_nothing() -> None:
    pool = PagePool(pages=4, page_size=64)
    held = pool.reserve(2) or ()
    assert pool.reserve(3) is None
    assert pool.free == 2
    pool.check([held])


@pytest.mark.parametrize(("slots", "pages"), [(1, 1), (63, 1), (64, 1), (65, 2), (0, 0), (640, 10)])
def test_pages_are_counted_by_whole_pages(slots: int, pages: int) -> None:
    assert PagePool(pages=1, page_size=64).pages_for(slots) == pages


def test_a_shared_page_is_free_only_when_its_last_holder_lets_go() -> None:
    pool = PagePool(pages=3, page_size=64)
    pages = pool.reserve(2) or ()
    pool.share(pages[:1])
    pool.release(pages)
    assert pool.free == 2
    pool.check([pages[:1]])
    pool.release(pages[:1])
    assert pool.free == 3


def test_releasing_or_sharing_a_free_page_is_loud() -> None:
    pool = PagePool(pages=2, page_size=64)
    with pytest.raises(InvariantViolation, match="page 1 is released but free"):
        pool.release((1,))
    with pytest.raises(InvariantViolation, match="page 0 is shared but free"):
        pool.share((0,))


def test_the_check_names_the_page_and_both_counts() -> None:
    pool = PagePool(pages=4, page_size=64)
    pages = pool.reserve(3) or ()
    with pytest.raises(InvariantViolation) as raised:
        pool.check([pages[:2]])
    assert raised.value.metadata == {"page": "2", "counted": "1", "holders": "0"}


def test_ten_thousand_random_reservations_leak_nothing() -> None:
    choose, pool = random.Random(7), PagePool(pages=40, page_size=64)
    held: list[tuple[int, ...]] = []
    for turn in range(10_000):
        if held and choose.random() < 0.5:
            pool.release(held.pop(choose.randrange(len(held))))
        elif held and choose.random() < 0.2:
            shared = choose.choice(held)
            pool.share(shared)
            held.append(shared)
        elif (pages := pool.reserve(choose.randint(1, 12))) is not None:
            assert len(set(pages)) == len(pages)
            held.append(pages)
        if turn % 100 == 0:
            pool.check(held)
    for pages in held:
        pool.release(pages)
    pool.check([])
    assert pool.free == 40
