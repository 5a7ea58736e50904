"""Which rank holds which stage: the usual shapes, any other map, and what is refused."""

import pickle

import pytest

from penstock.errors import ScheduleError
from penstock.ir import Placement


@pytest.mark.parametrize(
    ("placement", "ranks"),
    [
        (Placement.linear(3), (0, 1, 2)),
        (Placement.loop(3, stages_per_rank=2), (0, 1, 2, 0, 1, 2)),
        (Placement.loop(1, stages_per_rank=3), (0, 0, 0)),
        (Placement.v(3), (0, 1, 2, 2, 1, 0)),
        (Placement.v(1), (0, 0)),
        (Placement.v(2, stages_per_rank=1), (0, 1)),
        (Placement.v(2, stages_per_rank=3), (0, 1, 1, 0, 0, 1)),
        (Placement([2, 0, 0, 1]), (2, 0, 0, 1)),
        (Placement(iter([1, 0])), (1, 0)),
    ],
)
def test_placement_gives_the_rank_of_each_stage(
    placement: Placement, ranks: tuple[int, ...]
) -> None:
    assert ranks == placement.ranks
    assert len(ranks) == placement.num_stages
    assert len(set(ranks)) == placement.num_ranks


def test_stages_of_a_rank_are_in_order() -> None:
    assert (0, 5) == Placement.v(3).stages_of(0)
    assert (1, 4) == Placement.loop(3, stages_per_rank=2).stages_of(1)
    assert (0,) == Placement([2, 0, 0, 1]).stages_of(2)
    assert (1, 2) == Placement([2, 0, 0, 1]).stages_of(0)
    assert () == Placement.linear(2).stages_of(2)


def test_placements_are_equal_if_their_maps_are() -> None:
    assert Placement.linear(2) == Placement([0, 1])
    assert hash(Placement.linear(2)) == hash(Placement((0, 1)))
    assert Placement.v(2) != Placement.loop(2, stages_per_rank=2)


def test_placement_cannot_be_changed() -> None:
    placement = Placement.linear(2)
    with pytest.raises(AttributeError):
        placement.ranks = (0,)  # type: ignore[misc]
    assert (0, 1) == placement.ranks


def test_placement_can_go_to_another_process() -> None:
    assert Placement.v(3) == pickle.loads(pickle.dumps(Placement.v(3)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Placement([]),
        lambda: Placement.linear(-1),
        lambda: Placement.v(2, stages_per_rank=0),
    ],
    ids=["nothing", "linear", "v"],
)
def test_placement_without_a_stage_is_rejected(make: object) -> None:
    assert callable(make)
    with pytest.raises(ScheduleError) as caught:
        make()
    assert (
        "The placement has no stage. "
        "Give the rank of each stage, such as Placement([0, 1]) or Placement.linear(2)."
    ) == str(caught.value)


@pytest.mark.parametrize(("ranks", "stage"), [([0, -1], 1), ([0, 1, 0, -1, 0], 3)])
def test_negative_rank_is_rejected_with_its_stage(ranks: list[int], stage: int) -> None:
    with pytest.raises(ScheduleError) as caught:
        Placement(ranks)
    assert f"Stage {stage} is placed on rank -1. Ranks are numbered from 0." == str(caught.value)


@pytest.mark.parametrize(
    ("ranks", "empty", "largest"),
    [([1], 0, 1), ([0, 1, 0, 3], 2, 3), ([1, 0, 10**15], 2, 10**15)],
)
def test_rank_without_a_stage_is_rejected(ranks: list[int], empty: int, largest: int) -> None:
    with pytest.raises(ScheduleError) as caught:
        Placement(ranks)
    assert (
        f"Rank {empty} holds no stage, but rank {largest} does. "
        "Every rank up to the largest must hold at least one: leave no number out."
    ) == str(caught.value)
