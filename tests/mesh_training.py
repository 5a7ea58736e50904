"""Pipelines inside meshes: data, sharded and tensor parallel, against the whole model.

Used by tests/dist/test_meshes.py and by scripts/parallelisms.py, which makes tables of docs.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fsdp_param_group
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
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
def _meshes_of_twos(meshes: Meshes) -> list[DeviceMesh]:
    """For each rank of the pipeline, its processes two by two."""
    return [DeviceMesh("cpu", row.view(-1, 2)) for row in meshes.whole.mesh.flatten(1)]


def _shard_to_two(module: nn.Module, meshes: Meshes) -> nn.Module:
    """`reshard_after_forward=2`: the mesh it makes must be made by all processes, which a stage's
    own processes alone would wait for. So all make those of all stages ahead."""
    mine = _meshes_of_twos(meshes)[meshes["pp"].get_local_rank()]
    original, _fsdp_init.DeviceMesh = _fsdp_init.DeviceMesh, lambda *_: mine
    try:
        return _shard(module, meshes, reshard_after_forward=2)
    finally:
        _fsdp_init.DeviceMesh = original


def _wrap_in_ddp(module: nn.Module, meshes: Meshes) -> nn.Module:
    return DistributedDataParallel(module, process_group=meshes["dp"].get_group())


TENSOR_PARALLEL = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def _sequence_parallel(*, local: bool) -> dict[str, Any]:
    """The plan by which blocks take and return parts of sequences, as tensors or as DTensors."""
    column = ColwiseParallel(input_layouts=Shard(1))
    row = RowwiseParallel(output_layouts=Shard(1), use_local_output=local)
    return {"norm": SequenceParallel(), "up": column, "down": row, "first": column, "second": row}


def _parallelize(
    module: nn.Module, meshes: Meshes, *, plan: dict[str, Any] | None = None
) -> nn.Module:
    frozen = [name for name, param in module.named_parameters() if not param.requires_grad]
    for block in module.children():
        own = {name: style for name, style in (plan or {}).items() if hasattr(block, name)}
        parallelize_module(block, meshes["tp"], own or TENSOR_PARALLEL)
    for name in frozen:  # SequenceParallel makes new parameters, which all train.
        module.get_parameter(name).requires_grad_(False)
    return module


def _parallelize_and_shard(module: nn.Module, meshes: Meshes) -> nn.Module:
    return _shard(_parallelize(module, meshes), meshes)


def mean_square(outputs: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs, target)


def _mean_square_of_part(outputs: Tensor, target: Tensor) -> Tensor:
    """The share of half of each sequence in the mean."""
    return mean_square(outputs, target) / 2


def _mean_square_of_dtensors(outputs: DTensor, target: DTensor) -> Tensor:
    return mean_square(outputs.full_tensor(), target.full_tensor())


def _own_part(tensor: Tensor, meshes: Meshes) -> Tensor:
    mesh = meshes["tp"]
    return tensor.chunk(mesh.size(), dim=1)[mesh.get_local_rank()].contiguous()


def _as_dtensor(tensor: Tensor, meshes: Meshes) -> Tensor:
    return distribute_tensor(tensor, meshes["tp"], [Shard(1)])


class Wrapping(NamedTuple):
    """How a stage is wrapped, and the mesh that this needs beside the pipeline."""

    wrap: Wrap
    dimensions: dict[str, int]
    """By name; their sizes for the smallest mesh that shows something."""
    spread: Callable[[Tensor, Meshes], Tensor] = lambda tensor, _: tensor
    """What a process is given of a replica's inputs and targets."""
    loss_fn: Callable[[Any, Any], Tensor] = mean_square
    rounds: bool = False
    """True if FSDP2 computes in another dtype. The whole model is then wrapped alike."""


MIXED_PRECISION = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)


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
    "SP": Wrapping(
        partial(_parallelize, plan=_sequence_parallel(local=True)),
        {"tp": 2},
        _own_part,
        _mean_square_of_part,
    ),
    "SP, DTensors": Wrapping(
        partial(_parallelize, plan=_sequence_parallel(local=False)),
        {"tp": 2},
        _as_dtensor,
        _mean_square_of_dtensors,
    ),
    "mixed precision": Wrapping(partial(_shard, mp_policy=MIXED_PRECISION), {"dp": 2}, rounds=True),
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
    return _make_meshes(tuple({"pp": 2, **WRAPPINGS[wrapping].dimensions}.items()))


@cache
def _make_meshes(dimensions: tuple[tuple[str, int], ...]) -> Meshes:
    """One mesh for all cases of a process: the threads of its groups stay until the end.

    With a mesh for each case, 40 of them had 600 threads in every process, and each took longer
    than the one before.
    """
    names, sizes = zip(*dimensions, strict=True)
    return Meshes(init_device_mesh("cpu", sizes, mesh_dim_names=names))


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
    loss_fn = WRAPPINGS[case.wrapping].loss_fn
    return own, penstock.Pipeline(stages, schedule, loss_fn=loss_fn).step


class Reference:
    """The whole model: on the whole batch, or wrapped like the stages if these round."""

    def __init__(self, case: Case, meshes: Meshes, num_stages: int) -> None:
        self._wrapping = WRAPPINGS[case.wrapping]
        self.stages: list[nn.Module] = list(make_stages(case.model, num_stages))
        if self._wrapping.rounds:
            if case.model == "compiled":
                compile_blocks(self.stages)
            self.stages = [self._wrapping.wrap(stage, meshes) for stage in self.stages]
        self._ties = case.model == ACROSS_STAGES

    def backward(self, x: Tensor, target: Tensor, own: slice) -> None:
        """Compute the gradients of the mean over the batch; rows `own` are this replica's."""
        if not self._wrapping.rounds:
            mean_square(nn.Sequential(*self.stages)(x), target).backward()
        else:
            parts = [tensor[own].chunk(NUM_MICROBATCHES) for tensor in (x, target)]
            for number, (part, goal) in enumerate(zip(*parts, strict=True), start=1):
                for stage in self.stages:
                    stage.set_requires_gradient_sync(number == NUM_MICROBATCHES)
                loss = mean_square(nn.Sequential(*self.stages)(part), goal)
                (loss / NUM_MICROBATCHES).backward()
        if self._ties:
            first, last = self.stages[0][0].up.weight, self.stages[-1][0].up.weight
            first.grad = last.grad = first.grad + last.grad


def compile_blocks(stages: Iterable[nn.Module]) -> None:
    from interpreted_code import INTERPRETED  # Late: it loads torch's compiler.

    torch.compiler.reset()  # What other cases compiled must not count for this one.
    for stage in stages:
        for block in stage.children():
            block.compile(backend=INTERPRETED)


def run_case(case: Case, make_step: MakeStep = penstock_step) -> Found:
    """Train on this process's part of a mesh; compare with the whole model, on the whole batch."""
    meshes = make_meshes(case.wrapping)
    num_stages = penstock.schedules.get(case.schedule).stages_per_rank * 2
    reference = Reference(case, meshes, num_stages)
    whole = reference.stages
    modules = make_stages(case.model, num_stages)
    if case.model == "compiled":
        compile_blocks(modules)
    own, step = make_step(case, modules, meshes)
    params = {
        stage: [p for p in module.parameters() if p.requires_grad] for stage, module in own.items()
    }
    expected = {stage: [p for p in whole[stage].parameters() if p.requires_grad] for stage in own}
    optimizer = torch.optim.SGD(
        [p for of_stage in params.values() for p in of_stage], lr=0.1, foreach=False
    )
    whole_optimizer = torch.optim.SGD(
        [p for p in nn.ModuleList(whole).parameters() if p.requires_grad], lr=0.1, foreach=False
    )
    replica, num_replicas = 0, 1
    for name in meshes.replicas:
        replica = replica * meshes[name].size() + meshes[name].get_local_rank()
        num_replicas *= meshes[name].size()
    difference = 0.0
    spread = WRAPPINGS[case.wrapping].spread
    for number in range(NUM_STEPS):
        torch.manual_seed(100 + number)
        x, target = torch.randn(2, ROWS * num_replicas, TOKENS, WIDTH).double()
        whole_optimizer.zero_grad()
        rows = slice(replica * ROWS, (replica + 1) * ROWS)
        reference.backward(x, target, rows)
        optimizer.zero_grad()
        inputs, targets = (spread(tensor[rows], meshes) for tensor in (x, target))
        with counting() as counts:
            step(inputs, target=targets)
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


def _difference(mine: Any, theirs: Any) -> float:
    if mine is None:
        return float("inf")
    full, expected = (t.full_tensor() if isinstance(t, DTensor) else t for t in (mine, theirs))
    return (full - expected).abs().max().item()


def run_on_rank(_: dist.ProcessGroup, case: Case) -> Found:
    """Run a case on a worker of tests/worker_pool.py."""
    with warnings.catch_warnings():
        if case.model == "compiled":  # The compiler warns of what FSDP2 does.
            warnings.simplefilter("ignore")
        return run_case(case)
