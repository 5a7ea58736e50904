"""Two schedules that train the same model in turn learn the same, and both are recorded."""

from dataclasses import replace
from pathlib import Path

from small_runs import DATA, PLAIN, losses

from penstock import Recording
from penstock.comm import LocalGroup, local_ranks
from penstock.training.side_by_side import Contender, train_side_by_side
from penstock.training.trainer import StepDone


def test_each_schedule_trains_as_it_would_alone(tmp_path: Path) -> None:
    names = ("1F1B", "ZB-V")
    configs = [
        replace(PLAIN, steps=5, schedule=name, record=str(tmp_path / f"{name}.json"))
        for name in names
    ]
    told: list[tuple[str, int]] = []

    def run_rank(group: LocalGroup) -> list[Contender]:
        return train_side_by_side(
            configs, DATA, group=group, on_step=lambda name, done: told.append((name, done.step))
        )

    found, others = local_ranks(2, run_rank)
    assert [] == others
    assert list(names) == [contender.schedule for contender in found]
    for contender in found:
        assert losses(steps=5, schedule=contender.schedule) == contender.losses
        assert Recording.load(tmp_path / f"{contender.schedule}.json") == contender.recording
        assert 5 == len(contender.recording.steps)
    # They swap places in every round.
    expected = [("1F1B", 1), ("ZB-V", 1), ("ZB-V", 2), ("1F1B", 2), ("1F1B", 3), ("ZB-V", 3)]
    assert expected == told[:6]


def test_first_step_does_not_count_for_the_speed_unless_it_is_alone(tmp_path: Path) -> None:
    config = replace(PLAIN, num_ranks=1, steps=1, schedule="1F1B", record=str(tmp_path / "run"))
    [[contender]] = local_ranks(1, lambda group: train_side_by_side([config], DATA, group=group))
    steps = [StepDone(n, 1.0, duration_s, 64 / duration_s) for n, duration_s in enumerate((9, 1))]
    two = replace(contender, steps=tuple(steps))
    assert (1, 64) == (two.step_s, two.tokens_per_s)
    assert 9 == replace(contender, steps=tuple(steps[:1])).step_s
