"""What memory requires or allows to be over, against all states that microbatches can be in."""

from collections.abc import Iterator
from itertools import combinations_with_replacement, product
from random import Random

import pytest

from penstock.solver.work_in_memory import Hull, RankWork, StageWork

STAGES = [StageWork(2, 3, 1, 4, 1), StageWork(1, 2, 2, 3, 2)]


class Done:
    """One state of a microbatch: F on some stages, I on some from the last, and any W after I."""

    def __init__(
        self, stages: list[StageWork], forwards: int, inputs: int, weights: tuple[bool, ...]
    ) -> None:
        self.forwards, self.inputs = forwards, inputs
        first = len(stages) - inputs
        pairs = list(zip(stages[first:], weights, strict=True))
        self.held = sum(stage.after_forward for stage in stages[: min(forwards, first)])
        self.held += sum(stage.after_input for stage, is_over in pairs if not is_over)
        self.time = sum(stage.forward for stage in stages[:forwards])
        self.time += sum(stage.input + stage.weight * is_over for stage, is_over in pairs)


def all_done(stages: list[StageWork]) -> Iterator[Done]:
    for forwards in range(len(stages)):
        yield Done(stages, forwards, 0, ())
    for inputs in range(len(stages) + 1):
        for weights in product([False, True], repeat=inputs):
            yield Done(stages, len(stages), inputs, weights)


def random_stages(random: Random) -> list[StageWork]:
    return [
        StageWork(*(random.randint(0, 9) for _ in range(3)), random.randint(1, 9), kept)
        for kept in random.choices(range(6), k=random.randint(1, 3))
    ]


@pytest.mark.parametrize("seed", range(40))
def test_no_states_of_microbatches_do_less_or_more(seed: int) -> None:
    """All combinations of states of four microbatches, on one to three stages."""
    random = Random(seed)
    stages = random_stages(random)
    states, m = list(all_done(stages)), 3 if len(stages) > 2 else 4
    cap = random.uniform(1, m) * sum(stage.after_forward + stage.after_input for stage in stages)
    work, index = RankWork(stages, m, cap), random.randrange(len(stages))
    before = sum(stage.forward for stage in stages[: index + 1])
    held = sum(stage.after_forward for stage in stages[: index + 1])

    begun = [state for state in states if state.forwards > index]
    for mb in range(m):
        times = [
            sum(state.time - before for state in chosen)
            for chosen in combinations_with_replacement(begun, mb)
            if sum(state.held for state in chosen) + held <= cap
        ]
        assert work.least_freeing(index, mb) <= min(times, default=0) + 1e-9

    own = [state for state in states[len(stages) :] if state.inputs == len(stages) - 1 - index]
    later = [state for state in states if state.inputs < len(stages) - index]
    whole = sum(stage.total for stage in stages)
    for mb in range(m):
        for chosen in combinations_with_replacement(later, m - 1 - mb):
            for state in own:
                if state.held + sum(other.held for other in chosen) <= cap:
                    over = mb * whole + state.time + sum(other.time for other in chosen)
                    assert over <= work.most_before(index, mb) + 1e-9


def test_memory_of_all_stages_is_freed_by_what_frees_most_in_its_time() -> None:
    """An I and W of the last stage free 3 in 4, of both stages 7 in 8; I alone frees less."""
    work = RankWork(STAGES, 8, cap=14.0)
    assert 0 == work.least_freeing(index=1, mb=1)
    assert 8 == work.least_freeing(index=1, mb=2)  # 21 would be held, and 14 may be.
    assert 4 * 8 == pytest.approx(work.least_freeing(index=1, mb=5))
    assert 4.5 * 8 == pytest.approx(work.least_freeing(index=1, mb=5, extra=3.5))


def test_weight_backward_that_frees_more_in_its_time_comes_first() -> None:
    """I on both stages takes 2 and frees 2; then W of the first stage frees 8 in 1."""
    work = RankWork([StageWork(1, 1, 1, 9, 8), StageWork(1, 1, 8, 2, 1)], 4, cap=12.0)
    assert 3 == work.least_freeing(index=1, mb=1)  # 22 would be held.


def test_memory_for_two_microbatches_is_for_forwards_before_the_first_backward() -> None:
    """Two of both stages take 6; three of the first one, and the first one's second, take 7."""
    work = RankWork(STAGES, 8, cap=15.0)
    assert 3 + 2 * 2 == pytest.approx(work.most_before(index=1, mb=0))
    assert 11 + 3 + 2 * 2 == pytest.approx(work.most_before(index=1, mb=1))
    assert 3 + 2 == pytest.approx(work.most_before(index=1, mb=0, extra=4.0))


def test_all_can_be_over_without_a_cap() -> None:
    work = RankWork(STAGES, 3, cap=float("inf"))
    assert 0 == work.least_freeing(index=0, mb=2)
    assert 3 * 11 - 3 * (3 + 1) == work.most_before(index=0, mb=0)  # But I and W of this stage.
    assert 33 == work.total


def test_hull_is_below_all_points() -> None:
    hull = Hull([(0, 0), (1, 3), (2, 2), (4, 8), (3, 9)])
    assert [0, 0, 1, 2, 5, 8, 8] == [hull.at(x) for x in (-1, 0, 1, 2, 3, 4, 5)]
