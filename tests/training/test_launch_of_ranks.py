"""Starting ranks: who is one, whose failure is told, and what goes on after it."""

import signal
from pathlib import Path

import pytest

from penstock.training.gpt_sizes import SIZES
from penstock.training.launching import first_cause, is_worker, make_store
from penstock.training.rank_processes import STOPPED_BY_ANOTHER, Failure
from penstock.training.restarting import Restarts, num_lost
from penstock.training.settings import TrainConfig


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ((), False),
        (("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), True),
        (("RANK", "WORLD_SIZE", "MASTER_ADDR"), False),
        (("RANK", "WORLD_SIZE"), False),  # Some machines set these for all that runs on them.
        (("WORLD_SIZE", "MASTER_ADDR"), False),
    ],
)
def test_rank_knows_itself_by_its_environment(names: tuple[str, ...], expected: bool) -> None:
    assert expected == is_worker(dict.fromkeys(names, "0"))


@pytest.mark.parametrize(
    ("codes", "cause"),
    [
        ((-signal.SIGTERM, 1), 1),  # The launcher ends those that are left by SIGTERM.
        ((STOPPED_BY_ANOTHER, 1), 1),
        ((STOPPED_BY_ANOTHER, STOPPED_BY_ANOTHER), 0),
        ((-signal.SIGTERM, STOPPED_BY_ANOTHER), 1),
        ((STOPPED_BY_ANOTHER, -signal.SIGKILL), 1),
        # Who lost the connection to a process that was killed may not know that this was it.
        ((1, -signal.SIGKILL), 1),
    ],
)
def test_of_several_failures_the_first_cause_is_told(codes: tuple[int, ...], cause: int) -> None:
    failed = [Failure(rank, 100 + rank, code, Path()) for rank, code in enumerate(codes)]
    assert cause == first_cause(failed).rank


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="only Linux lists what listens")
def test_store_is_reached_from_this_machine_alone() -> None:
    store = make_store()
    listening = [
        columns[1]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for columns in map(str.split, Path(table).read_text().splitlines()[1:])
        if columns[3] == "0A" and columns[1].endswith(f":{store.port:04X}")
    ]
    assert [f"0100007F:{store.port:04X}"] == listening


def config(folder: Path, **options: int) -> TrainConfig:
    given = {"num_ranks": 4, "restarts": 2, **options}
    return TrainConfig(SIZES["tiny"], checkpoint=str(folder), **given)  # type: ignore[arg-type]


def killed(folder: Path, *, rank: int = 1) -> list[Failure]:
    errors = folder / "errors"
    errors.touch()
    others = [Failure(each, 70 + each, STOPPED_BY_ANOTHER, errors) for each in range(4)]
    others[rank] = Failure(rank, 70 + rank, -signal.SIGKILL, errors)
    return others


def test_training_goes_on_from_the_last_checkpoint_as_often_as_it_may(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    restarts = Restarts(config(tmp_path))
    (tmp_path / ".step-000010.incomplete").mkdir()
    first = restarts.after(killed(tmp_path))
    assert first is not None
    assert (4, False) == (first.num_ranks, first.resume)
    (tmp_path / "step-000010").mkdir()
    second = restarts.after(killed(tmp_path, rank=3))
    assert second is not None
    assert (4, True) == (second.num_ranks, second.resume)
    assert None is restarts.after(killed(tmp_path))
    assert capsys.readouterr().err.splitlines() == [
        "rank 1 (process 71) was ended by SIGKILL: beginning again at step 1 on 4 ranks "
        "(restart 1 of 2)",
        "rank 3 (process 73) was ended by SIGKILL: going on from step 10 on 4 ranks "
        "(restart 2 of 2)",
    ]


def test_spare_takes_the_place_of_a_lost_rank_before_there_are_fewer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    restarts = Restarts(config(tmp_path, restarts=9, min_ranks=3, spares=1))
    found = [restarts.after(killed(tmp_path)) for _ in range(3)]
    expected = [(4, 0), (3, 0), None]
    assert expected == [each and (each.num_ranks, each.spares) for each in found]
    assert capsys.readouterr().err.endswith(": 2 ranks are left, and --min-ranks is 3\n")


def test_ranks_that_failed_because_of_another_are_not_lost(tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    errors.write_text("RuntimeError: Connection closed by peer")
    others = [Failure(rank, 70 + rank, 1, errors) for rank in (0, 1)]
    assert 1 == num_lost([*others, Failure(2, 72, -signal.SIGKILL, errors)])
    assert 2 == num_lost([Failure(rank, 70 + rank, -signal.SIGKILL, errors) for rank in (2, 3)])
    assert 1 == num_lost(others)


def test_training_that_was_told_what_is_wrong_or_is_done_does_not_go_on(tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    errors.write_text("a warning\nerror: the loss is nan in step 7.\n")
    told = [Failure(0, 70, 1, errors), Failure(1, 71, STOPPED_BY_ANOTHER, errors)]
    assert None is Restarts(config(tmp_path)).after(told)
    errors.write_text("Traceback …\nRuntimeError: the device is gone\n")
    assert "rank 0 (process 70) failed: RuntimeError: the device is gone" == told[0].describe()
    assert None is not Restarts(config(tmp_path)).after(told)
    (tmp_path / "step-000200").mkdir()
    assert None is Restarts(config(tmp_path, steps=200)).after(told)
