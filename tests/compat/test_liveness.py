"""The slots that activations of a rank need: as torch finds them, and as the simulator counts."""

from itertools import product
from typing import Any

import pytest
from compat_ranks import M, on_ranks
from test_schedule_names import GivesOrder
from torch.distributed.pipelining import schedules as torch_schedules

from local_steps import mlp
from penstock import CostTable, Schedule, compat, simulate
from penstock.compat import schedules
from penstock.compat.liveness import Granularity, analyze_pipeline_activation_liveness
from penstock.errors import ScheduleError
from penstock.schedules import get, names

GRANULARITIES: list[Granularity] = ["stage_microbatch", "microbatch"]
SHAPES = [(1, 3), (2, 4), (2, 5), (3, 6), (4, 8)]
TRAINING = [name for name in names() if name != "ForwardOnly"]


class Planned(schedules._PipelineScheduleRuntime):
    """A schedule of compat without stages: all that the analysis asks for."""

    def __init__(self, schedule: Schedule) -> None:
        self.__dict__.update(_order=None, _planned=None, planned=schedule)

    @property
    def schedule(self) -> Schedule:
        return self.planned  # type: ignore[no-any-return]  # of __dict__

    @property
    def _n_microbatches(self) -> int:
        return self.schedule.num_microbatches


def make(name: str, num_ranks: int, num_microbatches: int) -> Schedule:
    return get(name)(num_ranks=num_ranks, num_microbatches=num_microbatches)


def analyze(schedule: Schedule, rank: int, granularity: Granularity) -> Any:
    return analyze_pipeline_activation_liveness(
        Planned(schedule),
        pp_rank=rank,
        stage_indices=schedule.placement.stages_of(rank),
        granularity=granularity,
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", TRAINING)
def test_slots_are_as_many_as_the_simulator_says_are_held(
    name: str, shape: tuple[int, int]
) -> None:
    schedule = make(name, *shape)
    costs = CostTable.uniform(schedule.num_stages, after_forward=1, after_input=1)
    report = simulate(schedule, costs)
    for rank in range(schedule.num_ranks):
        found = analyze(schedule, rank, "stage_microbatch")
        if "OVERLAP" in schedule.to_csv():  # Both halves of an overlap are held there.
            assert report.ranks[rank].peak_memory <= found.num_slots
        else:
            assert report.ranks[rank].peak_memory == found.num_slots


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", TRAINING)
def test_slot_is_used_by_one_activation_at_a_time(name: str, granularity: Granularity) -> None:
    schedule = make(name, 2, 5)
    for rank in range(2):
        found = analyze(schedule, rank, granularity)
        order = Planned(schedule).pipeline_order_with_comms[rank]
        users: dict[int, set[int]] = {slot: set() for slot in range(found.num_slots)}
        taken: set[tuple[int, int]] = set()
        for (stage, mb), slot in found.slot_by_stage_and_microbatch.items():
            start, end = found.get_activation_lifetime(stage, mb)
            assert slot == found.slot_for(stage, mb)
            if granularity == "stage_microbatch":
                assert f"{stage}F{mb}" in str(order[start])
                assert any(f"{stage}{kind}{mb}" in str(order[end]) for kind in "BW")
            elif (slot, mb) in taken:
                continue
            taken.add((slot, mb))
            assert users[slot].isdisjoint(range(start, end + 1))
            users[slot].update(range(start, end + 1))


@pytest.mark.skipif(
    not hasattr(torch_schedules, "analyze_pipeline_activation_liveness"),
    reason="new in torch 2.15, and another torch is installed",
)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_torch_finds_the_same(granularity: Granularity) -> None:
    kind = torch_schedules._PipelineScheduleRuntime
    for name, shape in product(TRAINING, SHAPES):
        schedule = make(name, *shape)
        theirs = kind.__new__(kind)
        theirs._n_microbatches = schedule.num_microbatches
        theirs.pipeline_order_with_comms = {
            rank: [torch_schedules._Action.from_str(str(cell)) for cell in row]
            for rank, row in Planned(schedule).pipeline_order_with_comms.items()
        }
        for rank in range(schedule.num_ranks):
            ours = analyze(schedule, rank, granularity)
            expected = torch_schedules.analyze_pipeline_activation_liveness(
                theirs,
                pp_rank=rank,
                stage_indices=schedule.placement.stages_of(rank),
                granularity=granularity,
            )
            for fact in vars(expected):
                assert getattr(expected, fact) == getattr(ours, fact), (name, shape, rank, fact)


def test_classes_with_and_without_messages_are_analysed() -> None:
    def main(schedule: Any) -> int:
        found = analyze_pipeline_activation_liveness(
            schedule, pp_rank=0, stage_indices=[3, 0], granularity="microbatch"
        )
        assert (3, 0) == found.stage_indices
        start, end = found.get_activation_lifetime(0, M - 1)
        order = (
            schedule.pipeline_order_with_comms
            if isinstance(schedule, schedules._PipelineScheduleRuntime)
            else schedule.pipeline_order
        )[0]
        assert f"0F{M - 1}" in str(order[start])
        assert str(order[end]) in (f"0B{M - 1}", f"0W{M - 1}", f"3B{M - 1}", f"3W{M - 1}")
        assert found == analyze_pipeline_activation_liveness(
            schedule, pp_rank=0, stage_indices=(3, 0), granularity="microbatch"
        )
        return found.num_slots

    for kind in (compat.ScheduleZBVZeroBubble, GivesOrder):
        results = on_ranks(mlp(), kind, main, style="v")
        assert [M, M] == results


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"granularity": "stage"}, "granularity is 'stage'. Expected"),
        ({"stage_indices": []}, r"stage_indices is \(\). Expected at least one"),
        ({"stage_indices": [0, 0]}, r"stage_indices is \(0, 0\). Expected"),
        ({"pp_rank": 2}, "pp_rank is 2. Expected a rank of the pipeline, from 0 to 1"),
        ({"stage_indices": [0, 1]}, "rank 0 has no forward and backward of microbatch 0 on stage"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    given = {"pp_rank": 0, "stage_indices": [0], "granularity": "microbatch", **options}
    with pytest.raises(ScheduleError, match=message):
        analyze_pipeline_activation_liveness(Planned(make("1F1B", 2, 4)), **given)


def test_activation_that_was_not_analysed_is_refused() -> None:
    found = analyze(make("1F1B", 2, 4), 0, "stage_microbatch")
    for ask in (found.slot_for, found.get_activation_lifetime):
        for key in ((1, 0), (0, 4)):
            with pytest.raises(ScheduleError, match=r"was not analysed\. Expected stages among"):
                ask(*key)
