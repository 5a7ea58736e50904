"""Pipelines inside meshes: data, sharded and tensor parallel, against the whole model.

Used by tests/dist/test_meshes.py and by scripts/parallelisms.py, which makes a table of docs.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fsdp_param_group
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import penstock

WIDTH, TOKENS, ROWS, NUM_MICROBATCHES, NUM_STEPS = 8, 4, 8, 4, 3

SCHEDULES = [
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZB-H1",
    "ZB-V",
    "DualPipeV",
    "V-Half",
]


class Block(nn.Module):
    """A norm and two linear layers around a residual, as in a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class CheckpointedBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        recomputed: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return recomputed


def _save_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


class SelectiveBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, _save_products)
        saved: Tensor = checkpoint(super().forward, x, use_reentrant=False, context_fn=contexts)
        return saved


class LoraBlock(Block):
    """Its own weights are frozen; only those of the adapter train."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.first = nn.Linear(WIDTH, 2, bias=False)
        self.second = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.second(self.first(x))


class TiedBlock(Block):
    """Both products are by one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.down.weight = self.up.weight


class ComputedBlock(Block):
    """A weight that is computed from parameters, and one that no layer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.scale = nn.Parameter(torch.rand(2 * WIDTH, 1))
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.linear(self.norm(x) @ self.matrix, self.up.weight * self.scale)
        return x + self.down(torch.tanh(hidden))


class ConvolutionBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Conv1d(TOKENS, 6, 3, padding=1)
        self.down = nn.Conv1d(6, TOKENS, 1)


BLOCKS: dict[str, type[Block]] = {
    "plain": Block,
    "checkpointed": CheckpointedBlock,
    "selective checkpoints": SelectiveBlock,
    "LoRA": LoraBlock,
    "tied": TiedBlock,
    "computed weights": ComputedBlock,
    "convolutions": ConvolutionBlock,
    "compiled": Block,
    "tied across stages": Block,
}
ACROSS_STAGES = "tied across stages"


class Meshes(NamedTuple):
    """One mesh of all processes, with the pipeline first."""

    whole: DeviceMesh

    def __getitem__(self, names: str | tuple[str, ...]) -> DeviceMesh:
        return self.whole[names]

    @property
    def replicas(self) -> tuple[str, ...]:
        """The dimensions over which a batch is spread."""
        names = self.whole.mesh_dim_names or ()
        return tuple(name for name in names if name not in ("pp", "tp"))


Wrap = Callable[[nn.Module, Meshes], nn.Module]


def _shard(module: nn.Module, meshes: Meshes, *, on: str = "both", **options: Any) -> nn.Module:
    mesh = meshes[meshes.replicas if len(meshes.replicas) > 1 else meshes.replicas[0]]
    if on != "root":
        for block in module.children():
            fully_shard(block, mesh=mesh, **options)
    if on != "blocks":
        fully_shard(module, mesh=mesh, **options)
    return module


@cache
def _make_pairs(mesh: DeviceMesh) -> list[DeviceMesh]:
    """For each stage, a mesh of its processes in pairs."""
    return [DeviceMesh("cpu", row.view(-1, 2)) for row in mesh.mesh.flatten(1)]


def _shard_to_two(module: nn.Module, meshes: Meshes) -> nn.Module:
    """`reshard_after_forward=2`: the mesh it makes must be made by all processes, which a stage's
    own processes alone would wait for. So all make those of all stages ahead."""
    mine = _make_pairs(meshes.whole)[meshes["pp"].get_local_rank()]
    original, _fsdp_init.DeviceMesh = _fsdp_init.DeviceMesh, lambda *_: mine
    try:
        return _shard(module, meshes, reshard_after_forward=2)
    finally:
        _fsdp_init.DeviceMesh = original


def _wrap_in_ddp(module: nn.Module, meshes: Meshes) -> nn.Module:
    return DistributedDataParallel(module, process_group=meshes["dp"].get_group())


TENSOR_PARALLEL = {"up": ColwiseParallel(), "down": RowwiseParallel()}
SEQUENCE_PARALLEL = {
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
}


def _parallelize(module: nn.Module, meshes: Meshes) -> nn.Module:
    for block in module.children():
        parallelize_module(block, meshes["tp"], TENSOR_PARALLEL)
    return module


def _parallelize_and_shard(module: nn.Module, meshes: Meshes) -> nn.Module:
    return _shard(_parallelize(module, meshes), meshes)


class Wrapping(NamedTuple):
    """How a stage is wrapped, and the mesh that this needs beside the pipeline."""

    wrap: Wrap
    dimensions: dict[str, int]
    """By name; their sizes for the smallest mesh that shows something."""


WRAPPINGS = {
    "DDP": Wrapping(_wrap_in_ddp, {"dp": 2}),
    "FSDP2": Wrapping(_shard, {"dp": 2}),
    "FSDP2, True": Wrapping(partial(_shard, reshard_after_forward=True), {"dp": 2}),
    "FSDP2, False": Wrapping(partial(_shard, reshard_after_forward=False), {"dp": 2}),
    "FSDP2, 2": Wrapping(_shard_to_two, {"dp": 4}),
    "FSDP2 on the stage": Wrapping(partial(_shard, on="root"), {"dp": 2}),
    "FSDP2 on blocks": Wrapping(partial(_shard, on="blocks"), {"dp": 2}),
    "HSDP": Wrapping(_shard, {"replicate": 2, "shard": 2}),
    "replicate": Wrapping(lambda m, meshes: replicate(m, mesh=meshes["dp"]), {"dp": 2}),
    "TP": Wrapping(_parallelize, {"tp": 2}),
    "FSDP2 + TP": Wrapping(_parallelize_and_shard, {"dp": 2, "tp": 2}),
}


def are_compatible(model: str, wrapping: str) -> bool:
    """Return whether torch itself can wrap such a model so: its plans are for linear layers."""
    is_tensor_parallel = "tp" in WRAPPINGS[wrapping].dimensions
    return not (is_tensor_parallel and model in ("tied", "computed weights", "convolutions"))


class Case(NamedTuple):
    """A model, how its stages are wrapped, and a schedule."""

    model: str
    wrapping: str
    schedule: str

    @property
    def num_ranks(self) -> int:
        """The number of processes: two ranks in each pipeline."""
        sizes = WRAPPINGS[self.wrapping].dimensions.values()
        return 2 * int(torch.tensor(list(sizes)).prod())


class Found(NamedTuple):
    """What a case showed on one process."""

    difference: float
    """The largest of any gradient or weight, in all steps, from the whole model's."""
    num_groups: int
    """Groups of sharded parameters on this process."""
    gathers: int
    """All-gathers in the last step."""
    reductions: int
    """Reduce-scatters, or all-reduces where nothing is sharded, in the last step."""


def make_stages(model: str, num_stages: int) -> list[nn.Sequential]:
    torch.manual_seed(0)
    kind = BLOCKS[model]
    stages = [nn.Sequential(kind(), kind()).double() for _ in range(num_stages)]
    if model == ACROSS_STAGES:
        stages[-1][0].up.weight.data.copy_(stages[0][0].up.weight)
    return stages


def mean_square(outputs: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs, target)


class Counts(NamedTuple):
    gathers: list[None]
    reductions: list[None]


@contextmanager
def counting() -> Iterator[Counts]:
    """Count the collectives that FSDP2 runs."""
    counts = Counts([], [])
    originals = _fsdp_param_group.foreach_all_gather, _fsdp_param_group.foreach_reduce

    def gather(*args: Any, **kwargs: Any) -> Any:
        counts.gathers.append(None)
        return originals[0](*args, **kwargs)

    def reduce(*args: Any, **kwargs: Any) -> Any:
        counts.reductions.append(None)
        return originals[1](*args, **kwargs)

    _fsdp_param_group.foreach_all_gather = gather
    _fsdp_param_group.foreach_reduce = reduce
    try:
        yield counts
    finally:
        _fsdp_param_group.foreach_all_gather, _fsdp_param_group.foreach_reduce = originals


def make_meshes(wrapping: str) -> Meshes:
    dimensions = {"pp": 2, **WRAPPINGS[wrapping].dimensions}
    return Meshes(_make_mesh(tuple(dimensions), tuple(dimensions.values())))


@cache
def _make_mesh(names: tuple[str, ...], sizes: tuple[int, ...]) -> DeviceMesh:
    """Make a mesh once: each of its groups has a thread that wakes up many times a second.

    Torch keeps them until the process ends, so new ones for every case would add up.
    """
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


Step = Callable[..., object]
MakeStep = Callable[[Case, list[nn.Sequential], Meshes], tuple[dict[int, nn.Module], Step]]


def penstock_step(
    case: Case, modules: list[nn.Sequential], meshes: Meshes
) -> tuple[dict[int, nn.Module], Step]:
    """Wrap the stages of this process; return them, and what runs a step."""
    schedule = penstock.schedules.get(case.schedule)(num_ranks=2, num_microbatches=NUM_MICROBATCHES)
    wrap = WRAPPINGS[case.wrapping].wrap
    own = {
        stage: wrap(modules[stage], meshes)
        for stage in schedule.placement.stages_of(meshes["pp"].get_local_rank())
    }
    group = meshes["pp"].get_group()
    last = schedule.num_stages - 1
    tied = {"0.up.weight": "shared"} if case.model == ACROSS_STAGES else {}
    stages = [
        penstock.PipelineStage(
            module,
            stage,
            schedule.num_stages,
            "cpu",
            group=group,
            tied=tied if stage in (0, last) else {},
        )
        for stage, module in own.items()
    ]
    return own, penstock.Pipeline(stages, schedule, loss_fn=mean_square).step


def run_case(case: Case, make_step: MakeStep = penstock_step) -> Found:
    """Train on this process's part of a mesh; compare with the whole model, on the whole batch."""
    meshes = make_meshes(case.wrapping)
    num_stages = penstock.schedules.get(case.schedule).stages_per_rank * 2
    whole = make_stages(case.model, num_stages)
    if case.model == ACROSS_STAGES:
        whole[-1][0].up.weight = whole[0][0].up.weight
    modules = make_stages(case.model, num_stages)
    if case.model == "compiled":
        for module in modules:
            for block in module:
                block.compile(backend="aot_eager")
    own, step = make_step(case, modules, meshes)
    params = {
        stage: [p for p in module.parameters() if p.requires_grad] for stage, module in own.items()
    }
    expected = {stage: [p for p in whole[stage].parameters() if p.requires_grad] for stage in own}
    optimizer = torch.optim.SGD(
        [p for of_stage in params.values() for p in of_stage], lr=0.1, foreach=False
    )
    whole_optimizer = torch.optim.SGD(
        [p for p in nn.ModuleList(whole).parameters() if p.requires_grad], lr=0.1
    )
    replica, num_replicas = 0, 1
    for name in meshes.replicas:
        replica = replica * meshes[name].size() + meshes[name].get_local_rank()
        num_replicas *= meshes[name].size()
    difference = 0.0
    for number in range(NUM_STEPS):
        torch.manual_seed(100 + number)
        x, target = torch.randn(2, ROWS * num_replicas, TOKENS, WIDTH).double()
        whole_optimizer.zero_grad()
        mean_square(nn.Sequential(*whole)(x), target).backward()
        optimizer.zero_grad()
        with counting() as counts:
            step(x.chunk(num_replicas)[replica], target=target.chunk(num_replicas)[replica])
        for stage in own:
            for mine, theirs in zip(params[stage], expected[stage], strict=True):
                assert theirs.grad is not None
                difference = max(difference, _difference(mine.grad, theirs.grad))
        optimizer.step()
        whole_optimizer.step()
        for stage in own:
            for mine, theirs in zip(params[stage], expected[stage], strict=True):
                difference = max(difference, _difference(mine.detach(), theirs.detach()))
    states = {
        id(group)
        for module in own.values()
        for part in module.modules()
        if hasattr(part, "_get_fsdp_state")
        for group in part._get_fsdp_state()._fsdp_param_groups
    }
    return Found(difference, len(states), len(counts.gathers), len(counts.reductions))


def _difference(mine: Any, theirs: Tensor) -> float:
    if mine is None:
        return float("inf")
    full = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
    return (full - theirs).abs().max().item()


def run_on_rank(_: dist.ProcessGroup, case: Case) -> Found:
    """Run a case on a worker of tests/worker_pool.py."""
    with warnings.catch_warnings():
        if case.model == "compiled":  # The compiler warns of what FSDP2 does.
            warnings.simplefilter("ignore")
        return run_case(case)
