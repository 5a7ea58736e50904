"""What goes between real ranks: types, shapes that change, gradients that are absent."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fuzzing import rotated
from limits import HANG_S
from local_steps import mean_square, mlp_batch, zero_grad
from penstock import Pipeline, Schedule, schedules
from penstock.comm import ProcessGroupComm
from penstock.errors import CommError
from penstock.ir.message import Channel
from stage_training import CPU, assert_close, assert_same_grads, make_stages
from staged_models import MODELS, MLPStage, StepRecord, named_grads, run_unsplit
from worker_pool import LINKS, WorkerPool

pytestmark = pytest.mark.dist

NUM_STAGES = 4
WIDTH = 6
NAMES = ["1F1B", "ZB-V", "DualPipeV"]


class Shift(nn.Module):
    """Its input and its parameter have one gradient between them."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class Give(nn.Module):
    """Tensors of many types and shapes, and values that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        empty = y.new_zeros(0, 3)
        others = {"half": y.bfloat16(), "single": y.float(), "is_positive": y > 0, "empty": empty}
        return y.t(), others, [y.sum(), (2 * y).int(), y.to(torch.complex128)], None, "mode", 2


class Take(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, y: Tensor, others: Any, rest: Any, nothing: None, mode: str, number: int
    ) -> Tensor:
        assert nothing is None
        assert (0, 3) == others["empty"].shape
        assert "mode" == mode
        total = sum(value.double() for name, value in others.items() if name != "empty")
        scalar, whole, pair = rest
        out: Tensor = self.layer(y.t()) * number + total + scalar + whole + pair.abs()
        return out


class Detach(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


def _modules(kind: str) -> list[nn.Module]:
    torch.manual_seed(0)
    modules: list[nn.Module] = [MLPStage() for _ in range(NUM_STAGES)]
    match kind:
        case "types":
            modules[1:3] = [Give(), Take()]
        case "one gradient":
            modules[1:3] = [Shift(), Shift()]
        case "passed through":
            modules[1:3] = [nn.Identity(), nn.Identity()]
        case "frozen first":
            modules[0].requires_grad_(False)
            modules[1].requires_grad_(False)
        case "frozen middle":
            modules[2].requires_grad_(False)
        case "no gradient":
            modules[1] = nn.Sequential(modules[1], Detach())
    return [module.double() for module in modules]


KINDS = [
    "types",
    "one gradient",
    "passed through",
    "frozen first",
    "frozen middle",
    "no gradient",
]


def _make(name: str) -> Schedule:
    generator = schedules.get(name)
    return generator(num_ranks=NUM_STAGES // generator.stages_per_rank, num_microbatches=4)


def _step(group: dist.ProcessGroup, name: str, kind: str) -> list[StepRecord]:
    schedule, modules = _make(name), _modules(kind)
    held = schedule.placement.stages_of(dist.get_rank(group))
    stages = make_stages(group, modules, held)
    pipeline = Pipeline(stages, schedule, loss_fn=mean_square, timeout=HANG_S)
    torch.manual_seed(1)
    x, target = mlp_batch().args[0].requires_grad_(), mlp_batch().target
    records = []
    for _ in range(3):
        zero_grad(modules)
        x.grad = None
        outputs = pipeline.step(x, target=target)
        grads = named_grads({index: modules[index] for index in held})
        if 0 in held:
            grads["x"] = None if x.grad is None else x.grad.clone()
        records.append(StepRecord(outputs, [], grads))
    return records


@rotated(kind=KINDS, name=NAMES, link=LINKS)
def test_step_is_as_unsplit(kind: str, name: str, link: str, pool: WorkerPool) -> None:
    """The reference runs the microbatches in turn: what stages add up depends on their size."""
    modules = _modules(kind)
    torch.manual_seed(1)
    x, target = mlp_batch().args[0].requires_grad_(), mlp_batch().target
    outputs = []
    for part, wanted in zip(x.tensor_split(4), target.tensor_split(4), strict=True):
        outputs.append(run_unsplit(modules, (part,), {}))
        (mean_square(outputs[-1], wanted) / 4).backward(retain_graph=True)
    grads = {**named_grads(dict(enumerate(modules))), "x": x.grad}
    results = pool.run(_make(name).num_ranks, _step, name, kind, link=link)
    for step in range(3):
        ranks = [records[step] for records in results]
        (actual,) = (record.outputs for record in ranks if record.outputs is not None)
        assert_close("outputs", torch.cat(outputs).detach(), actual)
        assert_same_grads(f"step {step}", grads, [record.grads for record in ranks])


def _kinds_of_links(group: dist.ProcessGroup) -> list[str]:
    comm = ProcessGroupComm(group, CPU, HANG_S)
    try:
        comm.gather(None)  # All have connected: nobody closes a connection that others still make.
        return [type(link).__name__ for link in comm._links.values()]
    finally:
        comm.close()


@pytest.mark.parametrize(
    ("link", "expected"), [("shared memory", "SharedMemoryLink"), ("gloo", "GlooLink")]
)
def test_pipelines_use_the_link_that_was_asked_for(
    link: str, expected: str, pool: WorkerPool
) -> None:
    """Tests over gloo went over shared memory, as processes of one machine do."""
    assert [[expected] * 3] * 4 == pool.run(4, _kinds_of_links, link=link)


def _fail_in_turn(group: dist.ProcessGroup) -> str:
    """Ranks 1 and 0 give up, one after the other; rank 2 waits for rank 0."""
    comm = ProcessGroupComm(group, CPU, HANG_S)
    comm.open([Channel(0, 2)])
    for number, rank in enumerate((1, 0), 1):
        if comm.rank == rank:
            comm.fail(f"failure {number}")
        dist.barrier(group)
    said = ""
    if comm.rank == 2:
        with pytest.raises(CommError) as caught:
            comm.recv(torch.empty(1), 0).wait(lambda: "a message")
        said = str(caught.value)
    dist.barrier(group)
    comm.close()
    return said


def test_first_failure_is_the_one_that_is_told(pool: WorkerPool) -> None:
    said = pool.run(4, _fail_in_turn)[2]
    assert "rank 2 stopped waiting for a message, because rank 1 failed: failure 1" == said


LENGTHS = [(3, 5, 2, 4), (1, 6, 6, 2), (4, 4, 4, 4)]


def _batches() -> list[list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(2)
    return [
        [(torch.randint(7, (2, length)), torch.randint(7, (2, length))) for length in lengths]
        for lengths in LENGTHS
    ]


def _step_dynamic(group: dist.ProcessGroup, name: str) -> StepRecord:
    model, schedule = MODELS["transformer"], _make(name)
    held = schedule.placement.stages_of(dist.get_rank(group))
    modules = [model.stage(index, NUM_STAGES) for index in range(NUM_STAGES)]
    stages = make_stages(group, modules, held, dynamic_shapes=True)
    loss_fn = model.loss_fn("sum")
    pipeline = Pipeline(stages, schedule, loss_fn=loss_fn, scale_grads=False, timeout=HANG_S)
    outputs = []
    for batch in _batches():
        args, targets = [(x,) for x, _ in batch], [target for _, target in batch]
        outputs.append(pipeline.step_microbatches(args, targets=targets))
    return StepRecord(outputs, [], named_grads({index: modules[index] for index in held}))


@rotated(name=NAMES, link=LINKS)
def test_lengths_may_change_with_microbatch_and_step(
    name: str, link: str, pool: WorkerPool
) -> None:
    model = MODELS["transformer"]
    modules = [model.stage(index, NUM_STAGES) for index in range(NUM_STAGES)]
    expected = []
    for batch in _batches():
        outputs = [run_unsplit(modules, (x,), {}) for x, _ in batch]
        for output, (_, target) in zip(outputs, batch, strict=True):
            model.loss(output, target, "sum").backward()
        expected.append([output.detach() for output in outputs])
    results = pool.run(_make(name).num_ranks, _step_dynamic, name, link=link)
    (actual,) = (record.outputs for record in results if record.outputs[0] is not None)
    assert_close("outputs", expected, actual)
    grads = named_grads(dict(enumerate(modules)))
    assert_same_grads("three steps", grads, [record.grads for record in results])
