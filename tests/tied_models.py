"""A model whose stages hold tied parameters, trained in a pipeline and unsplit.

`train_tied` is what each rank runs, with `penstock.local_ranks` or in a worker of `worker_pool`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from limits import HANG_S
from penstock import Pipeline, PipelineStage, Schedule, schedules
from penstock.schedules import Shape
from stage_training import CPU, Group, assert_close, rank_in

VOCABULARY, WIDTH, ROWS = 11, 6, 2
Wrap = Callable[[nn.Module], nn.Module]
Named = dict[str, Tensor | None]


class TiedStage(nn.Module):
    """An embedding on the first stage and a head on the last, tied; a mixture on three, tied."""

    def __init__(
        self, index: int, num_stages: int, *, sparse: bool = False, has_frozen_head: bool = False
    ) -> None:
        super().__init__()
        self.has_frozen_head = has_frozen_head
        is_first, is_last = index == 0, index == num_stages - 1
        has_mixture = index in (0, num_stages // 2, num_stages - 1)
        self.embed = nn.Embedding(VOCABULARY, WIDTH, sparse=sparse) if is_first else None
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.mixture = nn.Parameter(torch.empty(WIDTH, WIDTH)) if has_mixture else None
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if is_last else None
        if self.head is not None:
            self.head.requires_grad_(not has_frozen_head)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        x = x + torch.tanh(self.layer(x))
        if self.mixture is not None:
            x = x + torch.sin(x @ self.mixture)
        if self.head is not None and self.has_frozen_head:
            # Unsplit, it is one with the embedding, which is not frozen.
            return functional.linear(x, self.head.weight.detach())
        return x if self.head is None else self.head(x)

    @property
    def tied(self) -> dict[str, str]:
        """What a stage of this module says of its parameters."""
        shared = {"embed.weight": "words", "head.weight": "words", "mixture": "mixture"}
        names = dict(self.named_parameters(remove_duplicate=False))
        return {name: shared[name] for name in shared if name in names}


def tied_stage(index: int, num_stages: int, **options: Any) -> TiedStage:
    """The same stage with the same parameters, whoever makes it; copies of one are equal.

    But for their strides: the embedding's are not those of the head.
    """
    with torch.random.fork_rng():
        torch.manual_seed(index)
        module = TiedStage(index, num_stages, **options).double()
        for param_name, name in module.tied.items():
            torch.manual_seed(1000 + len(name))
            nn.init.normal_(module.get_parameter(param_name), std=0.5)
        if module.embed is not None:
            module.embed.weight = nn.Parameter(module.embed.weight.detach().T.contiguous().T)
    return module


def tied_stages(num_stages: int, **options: Any) -> list[TiedStage]:
    return [tied_stage(index, num_stages, **options) for index in range(num_stages)]


def tie_up(modules: Sequence[nn.Module]) -> None:
    """Make one Parameter of those that share a name, as in a model that is not split."""
    shared: dict[str, nn.Parameter] = {}
    for module in modules:
        assert isinstance(module, TiedStage)
        for param_name, name in module.tied.items():
            owner, _, attribute = param_name.rpartition(".")
            param = shared.setdefault(name, module.get_parameter(param_name))
            setattr(module.get_submodule(owner), attribute, param)


def tied_batch(size: int, number: int) -> tuple[Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(500 + number)
        tokens, target = torch.randint(VOCABULARY, (2, size, ROWS))
    return tokens, target


def loss_fn(outputs: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, -2), target.flatten())


def make_tied_pipeline(
    group: Group,
    schedule: Schedule,
    modules: Mapping[int, nn.Module],
    *,
    wrap: Wrap = lambda module: module,
    dynamic_shapes: bool = False,
    **options: Any,
) -> Pipeline:
    """One rank's pipeline of the stages that the schedule places there."""
    stages = [
        PipelineStage(
            wrap(modules[index]),
            index,
            schedule.num_stages,
            CPU,
            group=group,
            dynamic_shapes=dynamic_shapes,
            tied=modules[index].tied,
        )
        for index in schedule.placement.stages_of(rank_in(group))
    ]
    return Pipeline(stages, schedule, **{"loss_fn": loss_fn, "timeout": HANG_S, **options})


@dataclass(frozen=True)
class TiedRun:
    """What to train, and how."""

    schedule: str
    num_ranks: int
    num_updates: int = 3
    steps_per_update: int = 1
    """More than one: gradients of several steps are added up before the optimizer's."""
    sparse: bool = False
    has_frozen_head: bool = False
    is_dynamic: bool = False
    """Whether each step has a batch of another size."""

    def make_schedule(self) -> Schedule:
        generator = schedules.get(self.schedule)
        shape = Shape(self.num_ranks, 4, generator.stages_per_rank)
        m = max(shape.m, generator.min_microbatches(shape))
        return generator(num_ranks=self.num_ranks, num_microbatches=m)

    @property
    def stage_options(self) -> dict[str, bool]:
        return {"sparse": self.sparse, "has_frozen_head": self.has_frozen_head}

    def batches(self, update: int, num_microbatches: int) -> list[tuple[Tensor, Tensor]]:
        """Those of all steps before an update."""
        first = update * self.steps_per_update
        numbers = range(first, first + self.steps_per_update)
        growth = 1 if self.is_dynamic else 0
        return [tied_batch((2 + growth * n) * num_microbatches, n) for n in numbers]


@dataclass
class TiedRecord:
    """What one update leaves behind, by stage and name: of one rank, or unsplit."""

    grads: Named
    params: Named


def train_tied(
    group: Group, run: TiedRun, wrap: Wrap = lambda module: module, part: slice = slice(None)
) -> list[TiedRecord]:
    """One rank's share of a run, on a part of each microbatch's rows."""
    schedule = run.make_schedule()
    held = schedule.placement.stages_of(rank_in(group))
    own = {index: tied_stage(index, schedule.num_stages, **run.stage_options) for index in held}
    pipeline = make_tied_pipeline(group, schedule, own, wrap=wrap, dynamic_shapes=run.is_dynamic)
    optimizer = _make_optimizer(own.values())
    records = []
    for update in range(run.num_updates):
        optimizer.zero_grad()
        for tokens, target in run.batches(update, schedule.num_microbatches):
            pipeline.step(tokens[part], target=target[part])
            pipeline.eval(tokens[part], target=target[part])
        grads = grads_by_name(own)
        optimizer.step()
        records.append(TiedRecord(grads, _params(own)))
    return records


def train_tied_unsplit(run: TiedRun) -> list[TiedRecord]:
    """The same of the model in which tied parameters are one."""
    schedule = run.make_schedule()
    modules = tied_stages(schedule.num_stages, **run.stage_options | {"sparse": False})
    tie_up(modules)
    optimizer = _make_optimizer([nn.ModuleList(modules)])
    records = []
    for update in range(run.num_updates):
        optimizer.zero_grad()
        for tokens, target in run.batches(update, schedule.num_microbatches):
            loss_fn(nn.Sequential(*modules)(tokens), target).backward()
        grads = grads_by_name(dict(enumerate(modules)))
        optimizer.step()
        records.append(TiedRecord(grads, _params(dict(enumerate(modules)))))
    return records


def assert_trains_as_unsplit(run: TiedRun, ranks: Sequence[Sequence[TiedRecord]]) -> None:
    """Every gradient and parameter after every update; copies must be equal to the last bit."""
    num_stages = run.make_schedule().num_stages
    for update, expected in enumerate(train_tied_unsplit(run)):
        for kind in ("grads", "params"):
            actual: Named = {}
            for records in ranks:
                actual |= getattr(records[update], kind)
            wanted = getattr(expected, kind)
            assert wanted.keys() == actual.keys()
            for name, tensor in wanted.items():
                assert_close(f"update {update}, {kind}, {name}", tensor, actual[name])
            assert_copies_are_equal(actual, num_stages)


def assert_copies_are_equal(named: Named, num_stages: int) -> None:
    """By the names of all stages; None is equal to None only."""
    last = num_stages - 1
    mixtures = sorted({f"{index}.mixture" for index in (0, num_stages // 2, last)})
    for names in (["0.embed.weight", f"{last}.head.weight"], mixtures):
        first = named[names[0]]
        for name in names[1:]:
            other = named[name]
            assert (first is None) == (other is None), name
            assert first is None or torch.equal(first, other), name  # type: ignore[arg-type]


def grads_by_name(modules: Mapping[int, nn.Module]) -> Named:
    """A copy of each gradient; unlike `named_grads`, with all names of one parameter."""
    return {
        name: None if param.grad is None else param.grad.clone() for name, param in _named(modules)
    }


def _params(modules: Mapping[int, nn.Module]) -> Named:
    return {name: param.detach().clone() for name, param in _named(modules)}


def _named(modules: Mapping[int, nn.Module]) -> Iterable[tuple[str, nn.Parameter]]:
    for index, module in modules.items():
        for name, param in module.named_parameters(remove_duplicate=False):
            yield f"{index}.{name}", param


def _make_optimizer(modules: Iterable[nn.Module]) -> torch.optim.Optimizer:
    params = [param for module in modules for param in module.parameters()]
    return torch.optim.SGD(params, 0.05, momentum=0.9)
