"""What the demo recommends: the highest measured rate, the smaller budget where runs differ by no more than noise."""

from __future__ import annotations

import pytest

from bench.budgets import BUDGETS, Cost, Measured, best_tree, cost, recommend, turns, why


def at_rate(rate: float, per_step: float = 4.0) -> Cost:
    """1,000 tokens at `rate`."""
    return Cost(decoded=1000, steps=int(1000 / per_step), seconds=1000 / rate, same=True)


def costs(*rates: float) -> dict[int, Cost]:
    per_step = (1.0, 3.0, 4.0, 4.2, 4.4)
    return {budget: at_rate(rate, each) for budget, rate, each in zip(BUDGETS, rates, per_step, strict=True)}


@pytest.mark.parametrize(
    ("rates", "budget"),
    [
        ((100, 150, 200, 180, 160), 8),
        ((100, 150, 195, 200, 160), 8),  # 12 is 2.6 % faster: noise
        ((100, 150, 190, 200, 160), 12),  # 5.3 %: not noise
        ((500, 450, 400, 350, 300), 0),
        ((490, 500, 400, 350, 300), 0),  # plain decoding is preferred as well
        ((100, 110, 120, 130, 140), 16),
    ],
)
def test_the_smallest_budget_near_the_highest_rate_is_recommended(rates: tuple[float, ...], budget: int) -> None:
    assert recommend(costs(*rates)) == budget


def test_the_best_tree_is_named_even_where_no_tree_wins() -> None:
    assert best_tree(costs(500, 450, 400, 350, 300)) == 4


def test_the_reason_says_what_a_step_costs_and_brings() -> None:
    assert why(costs(100, 150, 200, 180, 160)) == (
        "recommended budget: 8, 200 tok/s: a step with trees of 8 takes 2.00 x a plain one (20.0 against 10.0 ms) "
        "and brings 4.00 x the tokens, so 2.00 x plain"
    )


def test_the_reason_for_no_tree_shows_the_best_tree_and_noise() -> None:
    said = why(costs(490, 500, 400, 350, 300))
    assert said.startswith("recommended budget: 0, no tree, 490 tok/s: a step with trees of 4 takes 2.9")
    assert said.endswith("so 1.02 x plain; 4 measured 2.0% more, within noise (3%)")


def test_a_cost_sums_prompts_and_takes_the_median_of_rounds() -> None:
    mine = [
        [Measured([1, 2, 3], 2, 1, seconds) for seconds in (0.5, 9.0, 0.7)],
        [Measured([4, 5, 6, 7], 3, 2, seconds) for seconds in (1.0, 1.2, 1.1)],
    ]
    assert cost(mine, mine) == Cost(decoded=5, steps=3, seconds=pytest.approx(1.8), same=True)


def test_one_other_token_in_one_round_is_told() -> None:
    plain = [[Measured([1, 2, 3], 2, 2, 1.0)] * 3]
    trees = [[Measured([1, 2, 3], 2, 1, 1.0), Measured([1, 2, 3], 2, 1, 1.0), Measured([1, 2, 4], 2, 1, 1.0)]]
    assert not cost(trees, plain).same


def test_budgets_take_turns_and_rounds_end_with_the_time() -> None:
    asked: list[tuple[int, int]] = []

    def generate(prompt: int, budget: int) -> Measured:
        asked.append((prompt, budget))
        return Measured([1, 2], 1, 1, 1.0)

    answers = turns(generate, prompts=2, rounds=(2, 5), seconds=0.0)
    assert asked == [(prompt, budget) for _ in range(2) for prompt in range(2) for budget in BUDGETS]
    assert [len(runs) for runs in answers[16]] == [2, 2]
    assert len(turns(generate, prompts=1, rounds=(2, 5), seconds=60.0)[0][0]) == 5
