from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock import schedules
from penstock.errors import OptionError, ScheduleError
from penstock.ir import Placement
from penstock.training.gpt_sizes import GptConfig
from penstock.training.orders import choose_orders
from penstock.training.settings import TrainConfig

PLAIN = TrainConfig(GptConfig(num_layers=4, width=16, num_heads=2, context=8))


def test_schedule_is_made_by_its_name() -> None:
    orders = choose_orders(replace(PLAIN, schedule="1f1b"))
    assert schedules.get("1F1B")(num_ranks=2, num_microbatches=8) == orders.schedule


@pytest.mark.parametrize(("stages_per_rank", "num_stages"), [(None, 4), (1, 2), (3, 6)])
def test_auto_has_a_v_and_no_schedule_yet(stages_per_rank: int | None, num_stages: int) -> None:
    orders = choose_orders(replace(PLAIN, schedule="Auto", stages_per_rank=stages_per_rank))
    assert orders.schedule is None
    expected = Placement.v(2, stages_per_rank=stages_per_rank or 2)
    assert expected == orders.placement
    assert num_stages == orders.placement.num_stages


def test_schedule_is_read_from_a_file(tmp_path: Path) -> None:
    expected = schedules.get("ZB-H1")(num_ranks=2, num_microbatches=8)
    path = tmp_path / "own.csv"
    path.write_text(expected.to_csv())
    assert expected == choose_orders(replace(PLAIN, schedule=str(path))).schedule


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"num_ranks": 3}, "--ranks is 3, but the schedule in"),
        ({"num_microbatches": 4}, "--microbatches is 4, but the schedule in"),
        ({"stages_per_rank": 2}, "--stages-per-rank is 2, but the schedule in"),
    ],
)
def test_file_that_is_for_something_else_is_rejected(
    tmp_path: Path, options: dict[str, Any], expected: str
) -> None:
    path = tmp_path / "own.csv"
    path.write_text(schedules.get("1F1B")(num_ranks=2, num_microbatches=8).to_csv())
    with pytest.raises(OptionError) as error:
        choose_orders(replace(PLAIN, schedule=str(path), **options))
    assert str(error.value).startswith(expected)


@pytest.mark.parametrize("content", [None, b"\xff\xfe", b"0F0,what"])
def test_file_that_is_no_schedule_is_rejected(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "own.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(
        OptionError, match=r"(?s)own\.csv cannot be read: .*Expected a file in PyTorch"
    ):
        choose_orders(replace(PLAIN, schedule=str(path)))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"schedule": "ZBV2"}, "Did you mean ZB-V?.*Or set --schedule to auto, or to a file"),
        ({"schedule": "ForwardOnly"}, "ForwardOnly has no backward, so nothing would be learned."),
        ({"num_ranks": 4}, "ZB-V on 4 ranks has 8 stages, but a model of 4 layers .* at most 6"),
        ({"num_ranks": 7, "schedule": "auto", "stages_per_rank": 1}, "has 7 stages"),
    ],
)
def test_schedule_that_cannot_train_the_model_is_rejected(
    options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(OptionError, match=expected):
        choose_orders(replace(PLAIN, **options))


def test_schedule_that_cannot_run_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("0F0,0B0\n1B0,1F0\n")  # The backward before its forward.
    with pytest.raises(ScheduleError):
        choose_orders(replace(PLAIN, schedule=str(path), num_microbatches=1))
