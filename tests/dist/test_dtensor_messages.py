"""DTensors between stages, on two pipelines of two ranks whose stages are tensor parallel.

Each rank compares its stages with the unsplit model on its own mesh. Both add up the gradients of
microbatches one after another, so they are equal to the last bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils import _pytree as pytree

import penstock
from fuzzing import IS_LONG
from limits import HANG_S
from penstock import Pipeline, PipelineStage, schedules
from penstock.errors import CommError, PipelineError, StageError
from worker_pool import LINKS, WorkerPool

pytestmark = pytest.mark.dist

CPU = torch.device("cpu")
WIDTH = 4
NUM_MICROBATCHES = 4


class Block(nn.Module):
    """Takes and returns a DTensor, or what `forward` makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.float64)
        self.down = nn.Linear(2 * WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(self.up(x).tanh())


class Summed(Block):
    """Returns a sum that has not been computed yet."""

    def forward(self, x: Tensor) -> Any:
        inner = self.up(x.redistribute(placements=[Replicate()])).tanh()
        return inner @ self.down.weight.t()


class Several(Block):
    """Returns DTensors among other values; one of them is used twice, and one has no gradient."""

    def forward(self, x: Tensor, *others: Any) -> Any:
        y = super().forward(x)
        if others:
            split, plain, mask, number = others
            whole = DTensor.from_local(plain * number, y.device_mesh, [Replicate()])
            y = (y + split * whole) * mask
        return y, y * 2, y.full_tensor().mean(), y > 0, 3


class Skipping(Block):
    """Returns its output twice: for the next stage, and for a later one."""

    def forward(self, *inputs: Tensor) -> Any:
        y = super().forward(sum(inputs[1:], inputs[0]))
        return (y, y * 3) if self.skips else y

    skips = False


@dataclass(frozen=True)
class Case:
    """What to train: all stages are of one class, with DTensors of one placement between them."""

    schedule: str
    between: Any
    shape: tuple[int, ...] = (6,)
    kind: type[Block] = Block
    skips: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = ()

    @property
    def evaluates(self) -> bool:
        """Whether the microbatches can be joined without a change of their placements."""
        return not self.lengths and self.between != Shard(0)

    def make(self, mesh: DeviceMesh, num_stages: int) -> list[nn.Module]:
        torch.manual_seed(0)
        return [self._make_stage(mesh, index, num_stages) for index in range(num_stages)]

    def _make_stage(self, mesh: DeviceMesh, index: int, num_stages: int) -> nn.Module:
        module = self.kind()
        if self.skips:
            module.skips = index == 0
        between = Shard(1) if isinstance(self.between, Partial) else self.between
        column = ColwiseParallel(input_layouts=between, use_local_output=False)
        row = RowwiseParallel(output_layouts=between, use_local_output=False)
        if self.kind is Summed:
            column = ColwiseParallel(use_local_output=False)
        return parallelize_module(module, mesh, {"up": column, "down": row})

    def batches(self, mesh: DeviceMesh) -> list[Tensor]:
        torch.manual_seed(1)
        placement = Replicate() if isinstance(self.between, Partial) else self.between
        lengths = self.lengths or self.shape * NUM_MICROBATCHES
        return [
            distribute_tensor(
                torch.randn(2, length, WIDTH, dtype=torch.float64), mesh, [placement]
            ).requires_grad_()
            for length in lengths
        ]


def loss_of(outputs: Any, target: Any) -> Tensor:
    """A DTensor, which has not been summed yet."""
    y = outputs[0] if isinstance(outputs, tuple) else outputs
    return (y.redistribute(placements=[Shard(1)]) * 1.5).square().sum() / 100


CASES = {
    "sequence": Case("ZB-H1", Shard(1)),
    "empty": Case("1F1B", Shard(1), (1,)),
    "several, uneven": Case("ZB-V", Shard(1), (5,), kind=Several),
    "dynamic": Case("1F1B", Shard(1), options={"dynamic_shapes": True}, lengths=(5, 1, 4, 6)),
    "batch": Case("ZB-H1", Shard(0)),
    "width": Case("1F1B", Shard(2)),
    "replicated": Case("DualPipeV", Replicate()),
    "partial": Case("ZB-V", Partial(), kind=Summed),
    "skips, uneven": Case("ZB-V", Shard(1), (5,), kind=Skipping, skips=True),
}
# The second link carries the same messages: those with odd shapes are enough.
NAMES = {link: list(CASES) if IS_LONG or link == LINKS[0] else list(CASES)[:4] for link in LINKS}


def train_all(world: Any, names: Sequence[str]) -> list[str]:
    """Train the cases, and compare them; what differs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    wrong = []
    for name in names:
        wrong += [f"{name}: {fault}" for fault in train(mesh, CASES[name])]
    return wrong


def train(mesh: DeviceMesh, case: Case) -> list[str]:
    generator = schedules.get(case.schedule)
    schedule = generator(num_ranks=2, num_microbatches=NUM_MICROBATCHES)
    rank, num_stages = mesh.get_local_rank("pp"), schedule.num_stages
    modules = case.make(mesh["tp"], num_stages)
    stages = []
    for index in schedule.placement.stages_of(rank):
        options = dict(case.options)
        if case.skips:
            last = num_stages - 1
            options |= {"skips_out": {last: 1}} if index == 0 else {}
            options |= {"skips_in": {0: 1}} if index == last else {}
        stages.append(
            PipelineStage(modules[index], index, num_stages, CPU, group=mesh["pp"], **options)
        )
    pipeline = Pipeline(stages, schedule, loss_fn=loss_of, timeout=HANG_S)
    whole = case.make(mesh["tp"], num_stages)
    faults = []
    try:
        for step in range(2):
            inputs, wanted = case.batches(mesh["tp"]), case.batches(mesh["tp"])
            expected, losses = run_unsplit(case, whole, wanted)
            args = [(x,) for x in inputs]
            found: list[Tensor] = []
            weights = [1] * NUM_MICROBATCHES if case.lengths else None
            is_last = num_stages - 1 in pipeline.stages
            outputs = pipeline.step_microbatches(
                args if rank == 0 else None, losses=found, weights=weights if is_last else None
            )
            for number, module in enumerate(modules):
                if number in pipeline.stages:
                    faults += compare(f"step {step} stage {number}", whole[number], module)
            if 0 in pipeline.stages:
                faults += differ("input", [x.grad for x in wanted], [x.grad for x in inputs])
            if is_last:
                faults += differ("outputs", expected, outputs)
                faults += differ("losses", losses, found)
            if case.evaluates:
                merged = pipeline.eval(torch.cat(inputs).detach())
                faults += differ("eval", join(expected) if is_last else None, merged)
    finally:
        pipeline.close()
    return faults


def join(outputs: list[Any]) -> Any:
    """The outputs of all microbatches as `eval` returns them."""
    return pytree.tree_map(_join_row, *outputs)


def _join_row(*row: Any) -> Any:
    if not isinstance(row[0], Tensor):
        return row[0]
    return torch.cat(row) if row[0].dim() else torch.stack(row)


def run_unsplit(
    case: Case, modules: Sequence[nn.Module], inputs: Sequence[Tensor]
) -> tuple[list[Any], list[Tensor]]:
    outputs, losses = [], []
    for x in inputs:
        values: Any = (x,)
        skipped: list[Any] = []
        for index, module in enumerate(modules):
            if skipped and index == len(modules) - 1:
                values = (*skipped, *values)
            values = module(*values)
            if case.skips and index == 0:
                values, skipped = (values[0],), [values[1]]
            values = values if isinstance(values, tuple) else (values,)
        outputs.append(values if len(values) > 1 else values[0])
        loss = loss_of(outputs[-1], None)
        (loss / NUM_MICROBATCHES).backward()
        losses.append(loss.detach())
    return pytree.tree_map_only(Tensor, Tensor.detach, outputs), losses


def compare(place: str, expected: nn.Module, found: nn.Module) -> list[str]:
    params = dict(found.named_parameters())
    return [
        fault
        for name, param in expected.named_parameters()
        for fault in differ(f"{place} {name}", param.grad, params[name].grad)
    ]


def differ(place: str, expected: Any, found: Any) -> list[str]:
    """What differs: placements, or the values of a rank's own parts."""
    faults = []
    pairs = zip(pytree.tree_leaves(expected), pytree.tree_leaves(found), strict=True)
    for number, (wanted, got) in enumerate(pairs):
        if type(wanted) is not type(got):
            faults.append(f"{place} {number}: {type(got).__name__}")
            continue
        if isinstance(wanted, DTensor):
            if wanted.placements != got.placements or wanted.device_mesh != got.device_mesh:
                faults.append(f"{place} {number}: {got.placements}, not {wanted.placements}")
            wanted, got = wanted.to_local(), got.to_local()
        if isinstance(wanted, Tensor) and not torch.equal(wanted, got):
            faults.append(f"{place} {number}: off by {(wanted - got).abs().max():.1e}")
    return faults


@pytest.mark.parametrize("link", LINKS)
def test_stages_train_as_the_unsplit_model(link: str, fresh_pool: WorkerPool) -> None:
    assert [[]] * 4 == fresh_pool.run(4, train_all, NAMES[link], link=link)


class Sender(nn.Module):
    """Returns DTensors whose placement is the next of a list."""

    def __init__(self, mesh: DeviceMesh, placements: Sequence[Any]) -> None:
        super().__init__()
        self.mesh = mesh
        self.placements = iter(placements)

    def forward(self, x: Tensor) -> Tensor:
        placement = next(self.placements)
        if placement is None:
            return x
        return DTensor.from_local(x, self.mesh, [placement], run_check=False)


class Receiver(nn.Module):
    """Has a parameter on each mesh."""

    def __init__(self, *meshes: DeviceMesh) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            DTensor.from_local(torch.ones(1), mesh, [Replicate()] * mesh.ndim, run_check=False)
            for mesh in meshes
        )

    def forward(self, x: Tensor) -> Tensor:
        return x.full_tensor() if isinstance(x, DTensor) else x


def run_steps(group: Any, modules: Sequence[nn.Module], options: dict[int, Any]) -> str:
    """What went wrong in two steps."""
    rank = dist.get_rank(group)
    try:
        stage = PipelineStage(modules[rank], rank, 2, CPU, group=group, **options.get(rank, {}))
        pipeline = Pipeline(
            stage, "1F1B", num_microbatches=2, loss_fn=lambda y, _: y.sum(), timeout=HANG_S
        )
        for _ in range(2):
            args = [(torch.ones(2, WIDTH, requires_grad=True),)] * 2
            pipeline.step_microbatches(args if rank == 0 else None)
    except PipelineError as error:
        return "" if isinstance(error, CommError) else str(error)
    finally:
        if "pipeline" in locals():
            pipeline.close()
    return ""


def refusals(world: Any) -> dict[str, str]:
    """What this rank says to each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    group, tp = mesh.get_group("pp"), mesh["tp"]
    swapped = DeviceMesh("cpu", tp.mesh.flip(0), mesh_dim_names=("tp",), _init_backend=False)

    def example(placement: Any) -> Tensor:
        return DTensor.from_local(torch.ones(2, WIDTH), tp, [placement], run_check=False)

    def steps(placements: Sequence[Any], *meshes: DeviceMesh, **options: Any) -> str:
        return run_steps(group, [Sender(tp, placements), Receiver(*meshes)], {1: options})

    one, other, plain = [Shard(1)], [Replicate()], [None]
    return {
        "right": steps(one * 4, tp),
        "part of a mesh": steps(one * 4, mesh),
        "given": steps(one * 4, get_mesh=lambda names, layout: mesh[names]),
        "example": steps(one * 4, input_args=example(Shard(1))),
        "next step": steps(one * 2 + other * 2, tp),
        "next microbatch": steps(one + other, tp),
        "plain later": steps(one * 2 + plain * 2, tp),
        "plain before": steps(plain * 2 + one * 2, tp),
        "no mesh": steps(one * 4),
        "two meshes": steps(one * 4, tp, swapped),
        "other place": steps(one * 4, get_mesh=lambda names, layout: swapped),
        "wrong mesh": steps(one * 4, get_mesh=lambda names, layout: mesh),
        "other example": steps(one * 4, tp, input_args=example(Replicate())),
        "plain example": steps(one * 4, tp, input_args=torch.ones(2, 2 * WIDTH)),
        "wrong shape": steps(one * 4, tp, input_args=example(Shard(0))[:2]),
    }


ON_MESH = "on a mesh with dimensions ('tp'), 2 ranks"
SHARDED = f"placements (Shard(dim=1)) {ON_MESH}"
REPLICATED = f"placements (Replicate()) {ON_MESH}"
ARRIVED = f"stage 1 on rank 1, microbatch 0: an input is a DTensor of shape (2, 8) with {SHARDED}"
REFUSED = {
    "next step": f"stage 0, microbatch 0: output 0: placement mismatch: expected {SHARDED}, "
    f"got {REPLICATED}. Keep it the same",
    "next microbatch": f"stage 0, microbatch 1: output 0: placement mismatch: expected {SHARDED}, "
    f"got {REPLICATED}. Keep it the same",
    "plain later": "stage 0, microbatch 0: output 0: kind mismatch: expected a DTensor of shape "
    f"(2, 8) with {SHARDED}, got a plain tensor. Keep it the same",
    "plain before": "stage 0, microbatch 0: output 0: kind mismatch: expected a plain tensor, "
    f"got a DTensor of shape (2, 8) with {SHARDED}. Keep it the same",
    "no mesh": f"{ARRIVED}, but the module's parameters are on no such meshes. Expected exactly "
    "one mesh of this rank with these dimensions. Give the stage "
    'get_mesh=lambda names, layout: mesh["tp"].',
    "two meshes": f"{ARRIVED}, but the module's parameters are on 2 such meshes.",
    "other place": f"{ARRIVED}, from a rank at ",
    "wrong mesh": f"{ARRIVED}, but get_mesh returned DeviceMesh((pp=2, tp=2)",
    "other example": f"stage 1, microbatch 0: input 0: placement mismatch: expected {REPLICATED}, "
    f"got {SHARDED}. Give the stage examples",
    "plain example": "stage 1, microbatch 0: input 0: kind mismatch: expected a plain tensor, got",
    "wrong shape": "stage 1, microbatch 0: input 0: placement mismatch",
}


def test_dtensors_that_change_or_have_no_mesh_are_refused(fresh_pool: WorkerPool) -> None:
    for rank, said in enumerate(fresh_pool.run(4, refusals)):
        for name, message in said.items():
            expected = REFUSED.get(name, "")
            is_said = expected.startswith(f"stage {rank // 2}")
            assert message.startswith(expected if is_said else ""), name
            assert bool(message) == is_said, (name, message)


def use_meshes(world: Any) -> list[str]:
    """What is said to meshes with two dimensions or without this rank, where one is expected."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    rank = mesh.get_local_rank("pp")
    pieces = penstock.cut_between_modules(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), ["1"]
    )
    x = torch.ones(4, WIDTH)
    for stage in (
        pieces.build_stage(rank, CPU, mesh["pp"]),
        penstock.build_stage(pieces.get_stage_module(rank), rank, 2, CPU, mesh["pp"]),
    ):
        assert stage.group is mesh.get_group("pp")
        pipeline = penstock.Schedule1F1B(
            stage, 2, nn.functional.mse_loss, replica_group=mesh["dp"], timeout=HANG_S
        )
        pipeline.step(x, target=x)
        pipeline.close()
    others = mesh.mesh[:, 1 - mesh.get_local_rank("dp")]
    elsewhere = DeviceMesh("cpu", others, mesh_dim_names=("pp",), _init_backend=False)
    module, said = nn.Linear(WIDTH, WIDTH), []
    for make in (
        lambda: PipelineStage(module, rank, 2, CPU, group=mesh),
        lambda: Pipeline(stage, "1F1B", num_microbatches=2, loss_fn=loss_of, replica_group=mesh),
        lambda: PipelineStage(module, rank, 2, CPU, group=elsewhere),
        lambda: PipelineStage(module, rank, 2, CPU, group="pp"),
        lambda: PipelineStage(module, rank, 2, CPU, group=mesh["pp"], get_mesh=mesh),
    ):
        try:
            make()
        except StageError as error:
            said.append(str(error))
    return said


def test_mesh_with_one_dimension_is_a_group(fresh_pool: WorkerPool) -> None:
    for group, replicas, elsewhere, text, get_mesh in fresh_pool.run(4, use_meshes):
        several = "is a DeviceMesh with 2 dimensions ('pp', 'dp'). Expected one dimension: select"
        assert f'group {several} it by its name, such as mesh["pp"].' == group
        assert f'replica_group {several} it by its name, such as mesh["dp"].' == replicas
        assert "Expected a mesh with this process: select it with mesh[" in elsewhere
        assert text.startswith("group is a str. Expected a torch.distributed process group or a")
        assert get_mesh.startswith("get_mesh is DeviceMesh(")
