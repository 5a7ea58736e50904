"""When one process fails, all of them end, soon, and say where it began."""

import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from failing_ranks import (
    Explosive,
    Report,
    Scenario,
    Session,
    boom,
    make_pipeline,
    note_failure,
    step,
)
from torch import Tensor, nn

from fuzzing import IS_LONG
from limits import HANG_S, PROCESS_S
from penstock import Pipeline, PipelineStage
from penstock.errors import DeadlineError
from penstock.ir import Backward, BackwardInput

pytestmark = pytest.mark.dist

SOON_S = HANG_S / 2  # Ranks that were not told would wait twice as long.
SHORT_TIMEOUT_S = 1.0  # Of pipelines that are to wait it out: what they say then is tested.
SCHEDULES = ("1F1B", "ZB-V")
STEPS = ("first", "third")
VICTIM = 1
WHERE = ("forward", "backward", "loss", "callback", "custom")


class _BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, burn: Any) -> Tensor:
        ctx.burn = burn
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.burn()
        return grad, None


class _Backfiring(Explosive):
    """Calls `burn(call)` in its backwards instead."""

    def __init__(self, burn: Any) -> None:
        super().__init__()
        self.count = 0
        self.late_burn = burn

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _BadBackward.apply(self.linear(x), self._burn)
        return y

    def _burn(self) -> None:
        self.count += 1
        self.late_burn(self.count)


def _num_microbatches(num_ranks: int) -> int:
    return 2 * num_ranks


def _culprit(where: str, schedule: str, num_ranks: int) -> int:
    """The rank that fails: that of the last stage has the loss, and otherwise the second."""
    is_v = schedule == "ZB-V"
    return (0 if is_v else num_ranks - 1) if where == "loss" else 1


def _explode(where: str, schedule: str, which: str, rank: int, num_ranks: int) -> None:
    """Fails at microbatch 1 of the first or third step."""
    m = _num_microbatches(num_ranks)
    number = (0 if which == "first" else 2) * m + 2
    is_culprit = rank == _culprit(where, schedule, num_ranks)
    calls: list[int] = []

    def burn(call: int | None = None) -> None:
        calls.append(1)
        if is_culprit and number == (call or len(calls)):
            boom(f"in {where}")

    def module_of(stage: int) -> nn.Module:
        if stage == rank and where == "forward":
            return Explosive(burn)
        return _Backfiring(burn) if stage == rank and where == "backward" else Explosive()

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if where == "loss":
            burn()
        return nn.functional.mse_loss(output, target)

    def on_grads_ready(stage: PipelineStage) -> None:
        if where == "callback" and stage.stage_index == rank:
            calls.append(1)
            if is_culprit and len(calls) == (1 if which == "first" else 3):
                boom("in callback")

    def custom(action: Any, context: Any) -> None:
        if action.mb == 1 and action.stage == rank and is_culprit:
            calls.append(1)
            if len(calls) == (1 if which == "first" else 3):
                boom("in custom")
        context.run(action)

    pipeline = make_pipeline(
        rank,
        num_ranks,
        schedule,
        m=m,
        module_of=module_of,
        loss_fn=loss_fn,
        on_grads_ready=on_grads_ready,
    )
    if where == "custom":
        for kind in (Backward, BackwardInput):
            pipeline.register_custom_function(kind, custom)
    step(pipeline, 4)  # A rank that had done its part is told in the step after.


def _sleep_in_a_step(rank: int, num_ranks: int, *, which: int = 2) -> None:
    """The last rank takes longer than the others wait."""
    m = _num_microbatches(num_ranks)

    def burn(call: int) -> None:
        if call == which * m + 2:
            note_failure()
            time.sleep(3 * SHORT_TIMEOUT_S)

    is_slow = rank == num_ranks - 1
    pipeline = make_pipeline(
        rank,
        num_ranks,
        m=m,
        module_of=lambda stage: Explosive(burn if is_slow else None),
        timeout=SHORT_TIMEOUT_S,
    )
    step(pipeline, 4)


def _stay_away(rank: int, num_ranks: int) -> None:
    """The last rank makes its pipeline, and no step."""
    pipeline = make_pipeline(rank, num_ranks, timeout=SHORT_TIMEOUT_S, group=dist.new_group())
    if rank < num_ranks - 1:
        step(pipeline)


def _come_late(rank: int, num_ranks: int) -> None:
    """The last rank begins its first step when the others have given up."""
    pipeline = make_pipeline(rank, num_ranks, timeout=SHORT_TIMEOUT_S)
    if rank == num_ranks - 1:
        time.sleep(SHORT_TIMEOUT_S + 2)  # A store that is a file looks once in a second.
    step(pipeline)


def _disagree_on_microbatches(rank: int, num_ranks: int) -> None:
    step(make_pipeline(rank, num_ranks, m=9 if rank == 1 else 8))


def _disagree_on_schedule(rank: int, num_ranks: int) -> None:
    step(make_pipeline(rank, num_ranks, "GPipe" if rank == 1 else "1F1B"))


def _disagree_on_stages(rank: int, num_ranks: int) -> None:
    step(make_pipeline(rank, num_ranks, "ZB-V" if rank == 1 else "1F1B"))


def _give_too_little(rank: int, num_ranks: int) -> None:
    pipeline = make_pipeline(rank, num_ranks)
    step(pipeline)
    if rank == 0:
        note_failure()
    pipeline.step(torch.ones(1, 4), target=torch.ones(pipeline.num_microbatches, 4))


def _change_the_batch(rank: int, num_ranks: int) -> None:
    pipeline = make_pipeline(rank, num_ranks)
    step(pipeline)
    rows = 2 * pipeline.num_microbatches
    if rank == 0:
        note_failure()
    pipeline.step(torch.ones(rows, 4), target=torch.ones(rows, 4))


def _lose_gradients_on_one_rank(rank: int, num_ranks: int) -> None:
    pipeline = make_pipeline(rank, num_ranks)
    step(pipeline)
    if rank == 0:
        note_failure()
    with torch.set_grad_enabled(rank != 0):
        step(pipeline)


def _wait_forever(rank: int, num_ranks: int) -> None:
    step(make_pipeline(rank, num_ranks, timeout=float("inf")))


def _use_a_device_without_channels(rank: int, num_ranks: int) -> None:
    stage = PipelineStage(nn.Linear(4, 4), rank, num_ranks, "meta")
    Pipeline(stage, "1F1B", num_microbatches=2).step(torch.ones(2, 4, device="meta"))


def _step_after_all_that(rank: int, num_ranks: int) -> None:
    """Gradients of a new pipeline on ranks that have seen many fail."""
    for name in SCHEDULES:
        modules = {}

        def module_of(stage: int, modules: dict[int, nn.Module] = modules) -> nn.Module:
            torch.manual_seed(stage)
            modules[stage] = Explosive().double()
            return modules[stage]

        pipeline = make_pipeline(rank, num_ranks, name, module_of=module_of)
        m, num_stages = pipeline.num_microbatches, pipeline.schedule.num_stages
        batch = torch.linspace(-1, 1, 8 * m, dtype=torch.float64).view(2 * m, 4)
        for _ in range(2):
            pipeline.step(batch, target=batch)
        own = {index: module_of(index, {}) for index in range(num_stages)}
        for _ in range(2):
            loss = nn.functional.mse_loss(nn.Sequential(*own.values())(batch), batch)
            loss.backward()
        for stage, module in modules.items():
            for param, expected in zip(module.parameters(), own[stage].parameters(), strict=True):
                torch.testing.assert_close(param.grad, expected.grad, rtol=1e-10, atol=1e-12)


def _step_after_an_absence(rank: int, num_ranks: int) -> None:
    group = dist.new_group()
    first = make_pipeline(rank, num_ranks, timeout=SHORT_TIMEOUT_S, group=group)
    if rank < num_ranks - 1:
        with suppress(DeadlineError):
            step(first)
    dist.barrier()
    step(make_pipeline(rank, num_ranks, group=group))


def _wait_for_a_signal(name: str, rank: int, num_ranks: int) -> None:
    """The second rank tells where it is in the third step, and stays there."""
    m = _num_microbatches(num_ranks)

    def burn(call: int) -> None:
        if call == 2 * m + 2:
            Path(os.environ["PENSTOCK_TEST_FOLDER"], f"{name} me").touch()
            time.sleep(HANG_S)  # Until the signal comes.

    pipeline = make_pipeline(
        rank,
        num_ranks,
        m=m,
        module_of=lambda stage: Explosive(burn if rank == VICTIM else None),
    )
    step(pipeline, 4)


EXPLOSIONS = [
    (where, name, which)
    for place, where in enumerate(WHERE)
    for number, (name, which) in enumerate(product(SCHEDULES, STEPS))
    if IS_LONG or (place + number) % 3 == 0  # One or two for each, and all of them come up.
]
TOGETHER: list[tuple[str, Scenario]] = [
    *((f"{w} {n} {s}", partial(_explode, w, n, s)) for w, n, s in EXPLOSIONS),
    ("sleep", _sleep_in_a_step),
    ("too little", _give_too_little),
    ("change the batch", _change_the_batch),
]
# They take long, or do not depend on the number of ranks.
WITH_FOUR_RANKS: list[tuple[str, Scenario]] = [
    ("sleep in the first step", partial(_sleep_in_a_step, which=0)),
    ("disagree on num_microbatches", _disagree_on_microbatches),
    ("disagree on schedule", _disagree_on_schedule),
    ("disagree on num_stages", _disagree_on_stages),
    ("no gradients", _lose_gradients_on_one_rank),
    ("wait forever", _wait_forever),
    ("no channels", _use_a_device_without_channels),
    ("come late", _come_late),
    ("stay away", _stay_away),
    ("after an absence", _step_after_an_absence),
]
AT_THE_END: list[tuple[str, Scenario]] = [
    ("after all that", _step_after_all_that),
    ("interrupt", partial(_wait_for_a_signal, "interrupt")),
    ("kill", partial(_wait_for_a_signal, "kill")),
]


# Connected by gloo, as between machines, and as within one.
TWO, FOUR = (2, "0"), (4, "1")
with_four_ranks = pytest.mark.parametrize("session", [FOUR], indirect=True, ids=["4 ranks"])


@pytest.fixture(scope="module", params=[TWO, FOUR], ids=["2 ranks", "4 ranks"])
def session(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Session]:
    """All scenarios that leave the processes alive, each with a new pipeline."""
    folder = tmp_path_factory.mktemp("together")
    num_ranks, shared_memory = request.param
    scenarios = [*TOGETHER, *(WITH_FOUR_RANKS if num_ranks == 4 else []), *AT_THE_END]
    with Session(folder, num_ranks, scenarios, shared_memory=shared_memory) as session:
        for name, signum in (("interrupt", signal.SIGINT), ("kill", signal.SIGKILL)):
            if session.comes(f"{name} me", PROCESS_S):
                time.sleep(0.3)  # Until the others wait.
                session.signal(name, VICTIM, signum)
        session.join(PROCESS_S)
        yield session


def _others(reports: list[Report], culprit: int) -> list[tuple[int, Report]]:
    return [(rank, report) for rank, report in enumerate(reports) if rank != culprit]


def _assert_soon(session: Session, name: str, reports: list[Report]) -> None:
    failed_at = session.failed_at(name)
    for report in reports:
        assert report.ended_at - failed_at < SOON_S


@pytest.mark.parametrize(("where", "name", "which"), EXPLOSIONS)
def test_an_exception_on_one_rank_ends_all_and_says_where(
    session: Session, where: str, name: str, which: str
) -> None:
    scenario = f"{where} {name} {which}"
    reports = session.reports(scenario)
    culprit = _culprit(where, name, session.num_ranks)
    own = reports[culprit]
    assert "Boom" == own.kinds[0], own.trace
    assert f"in {where}" == own.text
    (place,) = own.notes
    assert place.endswith(f"on rank {culprit}")
    if where == "forward":
        assert f"in {culprit}F1 (forward of microbatch 1 on stage {culprit})" in place
    elif where != "callback":
        assert "of microbatch 1 on stage" in place
    for rank, report in _others(reports, culprit):
        assert report.is_a("CommError", "RuntimeError"), report.trace
        assert not report.is_a("DeadlineError"), report.trace
        assert report.text.startswith(f"rank {rank} stopped waiting for ")
        assert f"because rank {culprit} failed: Boom: in {where}, {place}" in report.text
    _assert_soon(session, scenario, reports)


def _check_that_waiting_ends(session: Session, scenario: str) -> None:
    waiting = _others(session.reports(scenario), session.num_ranks - 1)
    failed_at = session.failed_at(scenario)
    for rank, report in waiting:
        assert report.is_a("CommError"), report.trace
        assert "DeadlineError" in report.text or report.is_a("DeadlineError"), report.trace
        assert report.text.startswith(f"rank {rank} ")
        expected = r"timed out after 1 s waiting for the \w+ of microbatch \d for stage \d"
        assert re.search(expected, report.text)
        assert SHORT_TIMEOUT_S * 0.5 < report.ended_at - failed_at < SOON_S
    in_vain = [report for _, report in waiting if report.is_a("DeadlineError")]
    assert in_vain
    for report in in_vain:
        assert report.is_a("TimeoutError", "RuntimeError", "PipelineError")
        assert "from stage" in report.text
        assert report.text.endswith("give the pipeline a larger timeout.")


def test_a_rank_that_takes_too_long_is_told_with_who_waits_for_what(session: Session) -> None:
    _check_that_waiting_ends(session, "sleep")


@with_four_ranks
def test_a_rank_that_takes_too_long_in_the_first_step_is_told(session: Session) -> None:
    _check_that_waiting_ends(session, "sleep in the first step")


def test_a_rank_that_took_too_long_is_told_when_it_goes_on(session: Session) -> None:
    slow = session.reports("sleep")[-1]
    assert slow.is_a("CommError"), slow.trace
    assert "failed: DeadlineError: " in slow.text


@with_four_ranks
def test_a_rank_that_makes_no_step_is_named(session: Session) -> None:
    reports = session.reports("stay away")
    absent = session.num_ranks - 1
    assert [] == reports[absent].kinds
    for rank, report in _others(reports, absent):
        assert report.is_a("DeadlineError", "TimeoutError"), report.trace
        expected = (
            f"rank {rank} timed out after 1 s waiting for rank {absent} to begin a first step with "
            "the same pipeline."
        )
        assert report.text.startswith(expected)
        assert report.seconds < SOON_S


@with_four_ranks
def test_a_rank_that_comes_too_late_is_told(session: Session) -> None:
    reports = session.reports("come late")
    late = session.num_ranks - 1
    for report in reports:
        assert report.is_a("CommError"), report.trace
    assert "ranks 0, 1, 2 to begin a first step again, after giving up" in reports[late].text
    assert reports[late].seconds < SOON_S


@pytest.mark.parametrize(
    ("name", "values"),
    [("num_microbatches", ("8", "9")), ("schedule", ("Schedule(",) * 2), ("num_stages", None)],
)
@with_four_ranks
def test_ranks_that_disagree_all_say_so_with_every_value(
    session: Session, name: str, values: tuple[str, str] | None
) -> None:
    p = session.num_ranks
    most, odd = values or (str(p), str(2 * p))
    for report in session.reports(f"disagree on {name}"):
        assert report.is_a("AgreementError", "RuntimeError"), report.trace
        assert report.text.startswith(f"the ranks disagree on {name} (rank 0: {most}")
        assert f"rank 1: {odd}" in report.text
        assert report.seconds < SOON_S


@pytest.mark.parametrize(
    ("scenario", "kind"),
    [("too little", "MicrobatchError"), ("change the batch", "PipeliningShapeError")],
)
def test_a_bad_batch_on_the_first_rank_ends_all(session: Session, scenario: str, kind: str) -> None:
    reports = session.reports(scenario)
    assert reports[0].is_a(kind), reports[0].trace
    for _, report in _others(reports, 0):
        assert report.is_a("CommError"), report.trace
        assert f"rank 0 failed: {kind}: " in report.text
    _assert_soon(session, scenario, reports)


@with_four_ranks
def test_a_step_without_gradients_on_one_rank_ends_all(session: Session) -> None:
    reports = session.reports("no gradients")
    assert reports[0].is_a("StageError"), reports[0].trace
    for _, report in _others(reports, 0):
        assert report.is_a("CommError"), report.trace
        assert "gradients are disabled" in report.text


@with_four_ranks
def test_a_timeout_without_end_is_taken_or_refused(session: Session) -> None:
    for report in session.reports("wait forever"):
        assert not report.kinds or report.is_a("StageError"), report.trace


@with_four_ranks
def test_a_device_without_channels_is_rejected(session: Session) -> None:
    for report in session.reports("no channels"):
        assert report.is_a("StageError"), report.trace
        assert report.text.startswith(
            "device is meta, and the process group has no backend for meta (it has cpu:gloo"
        )
        assert report.text.endswith("or put the stages on cpu or cuda.")


def test_a_new_pipeline_works_after_all_that_failed(session: Session) -> None:
    for report in session.reports("after all that"):
        assert [] == report.kinds, report.trace


@with_four_ranks
def test_a_new_pipeline_works_after_a_rank_had_stayed_away(session: Session) -> None:
    for report in session.reports("after an absence"):
        assert [] == report.kinds, report.trace


def test_an_interrupt_of_one_rank_ends_all(session: Session) -> None:
    reports = session.reports("interrupt")
    assert "KeyboardInterrupt" == reports[VICTIM].kinds[0]
    for _, report in _others(reports, VICTIM):
        assert report.is_a("CommError"), report.trace
        assert f"rank {VICTIM} failed: KeyboardInterrupt" in report.text
    _assert_soon(session, "interrupt", reports)


def test_a_process_that_is_killed_ends_all_others(session: Session) -> None:
    for rank in range(session.num_ranks):
        if rank != VICTIM:
            report = session.report("kill", rank)
            assert report.is_a("CommError"), report.trace
            assert not report.is_a("DeadlineError"), report.trace
            dead = f"(host {socket.gethostname()}, stage {VICTIM}) was killed by SIGKILL, in step"
            assert f", because rank {VICTIM} {dead}" in report.text
            place = f", in {VICTIM}F1 (forward of microbatch 1 on stage {VICTIM})."
            assert report.text.endswith(place)
            assert report.ended_at - session.failed_at("kill") < SOON_S


def test_the_processes_that_are_left_end_well(session: Session) -> None:
    expected = [-signal.SIGKILL if rank == VICTIM else 0 for rank in range(session.num_ranks)]
    assert expected == [process.exitcode for process in session.processes]
