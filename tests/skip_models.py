"""A model with values that skip stages, trained in a pipeline and unsplit.

`train_skips` is what each rank runs, with `penstock.local_ranks` or in a worker of `worker_pool`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from limits import HANG_S
from penstock import Pipeline, PipelineStage, Schedule
from stage_training import CPU, Group, assert_same_step, rank_in, split
from staged_models import StepRecord, make_optimizer, named_grads

WIDTH = 6
# How many values there are in each kind of skip.
COUNTS = {
    "one": 1,
    "two": 2,
    "same": 1,
    "integers": 1,
    "detached": 1,
    "nested": 1,
    "unused": 1,
    "large": 1,
}
KINDS = [kind for kind in COUNTS if kind != "large"]
# Of float64, with two rows to a microbatch: 4 MiB.
LARGE = 4 * 2**20 // (8 * 2 * WIDTH)


class Skip(NamedTuple):
    source: int
    target: int
    kind: str = "one"


class SkipStage(nn.Module):
    """A residual layer that takes what skipped stages to here, and gives what goes on to others.

    A stage that is `silent` gives the next one nothing; that begins with a parameter of its own.
    """

    def __init__(self, index: int, num_stages: int, skips: Sequence[Skip], silent: Sequence[int]):
        super().__init__()
        self.index = index
        self.is_silent = index in silent
        self.is_last = index == num_stages - 1
        self.sources = {s.source: s.kind for s in sorted(skips) if s.target == index}
        self.targets = {s.target: s.kind for s in sorted(skips) if s.source == index}
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.start = nn.Parameter(torch.randn(1, WIDTH)) if index - 1 in silent else None
        self.give = nn.ModuleDict({str(t): nn.Linear(WIDTH, WIDTH) for t in self.targets})
        self.take = nn.ModuleDict({str(s): self._taker(kind) for s, kind in self.sources.items()})

    @property
    def skips_in(self) -> dict[int, int]:
        return {source: COUNTS[kind] for source, kind in self.sources.items()}

    @property
    def skips_out(self) -> dict[int, int]:
        # The last first: their order in the mapping says nothing.
        return {target: COUNTS[kind] for target, kind in reversed(self.targets.items())}

    def forward(self, *args: Any) -> Any:
        """What a stage calls: arguments and results in the order of its `skips_in`, `skips_out`."""
        skipped = {}
        for source, kind in self.sources.items():
            skipped[source], args = args[: COUNTS[kind]], args[COUNTS[kind] :]
        regular, given = self.compute(args, skipped)
        for target in self.targets:
            regular += given[target]
        is_bare = len(regular) == 1 and (self.is_last or self.index % 2 == 1)
        return regular[0] if is_bare else regular

    def compute(
        self, args: tuple[Any, ...], skipped: dict[int, tuple[Any, ...]]
    ) -> tuple[tuple[Any, ...], dict[int, tuple[Any, ...]]]:
        """What goes to the next stage, and by stage what skips it; from the same of others."""
        (x,) = args if self.start is None else (*args, self.start)
        y = x + torch.tanh(self.layer(x))
        for source, kind in self.sources.items():
            y = y + self._taken(source, kind, *skipped[source])
        given = {target: self._given(target, kind, y) for target, kind in self.targets.items()}
        return () if self.is_silent else (y,), given

    def _given(self, target: int, kind: str, y: Tensor) -> tuple[Any, ...]:
        value = self.give[str(target)](y)
        ids = (value > 0).long()
        match kind:
            case "two":
                return value, torch.sigmoid(y)
            case "same":
                return (y,)
            case "integers":
                return (ids,)
            case "detached":
                return (value.detach(),)
            case "nested":
                return ({"a": value, "b": [torch.sin(y), ids, 3]},)
            case "large":
                return (value.unsqueeze(-1) * torch.linspace(0, 1, LARGE).double(),)
        return (value,)

    def _taker(self, kind: str) -> nn.Module:
        return nn.Embedding(2, WIDTH) if kind == "integers" else nn.Linear(WIDTH, WIDTH)

    def _taken(self, source: int, kind: str, *values: Any) -> Tensor | float:
        """Another one for each source: what comes from one must not be taken for another's."""
        take = self.take[str(source)]
        match kind:
            case "unused":
                return 0.0
            case "two":
                result = take(values[0]) * values[1]
            case "integers":
                result = take(values[0]).mean(-2)
            case "nested":
                b, ids, number = values[0]["b"]
                result = take(values[0]["a"]) * number + b * ids
            case "large":
                result = take((values[0] * torch.linspace(1, 2, LARGE).double()).mean(-1))
            case _:
                result = take(values[0])
        return torch.sin(result + source) / len(self.sources)


@dataclass(frozen=True)
class SkipRun:
    """What to train, and how."""

    schedule: Schedule
    skips: tuple[Skip, ...]
    silent: tuple[int, ...] = ()
    """Stages that give nothing to the next one."""
    is_even: bool = True
    """Whether all microbatches have one size; else losses are sums, which do not care."""
    is_dynamic: bool = False
    """Whether each step has a batch of another size."""
    evaluates: bool = False
    """Whether each step is followed by an eval of the same batch."""
    is_cut: bool = False
    """Whether the batch is given in microbatches."""
    num_steps: int = 2

    def module(self, index: int) -> SkipStage:
        """The same stage with the same parameters, whoever makes it."""
        with torch.random.fork_rng():
            torch.manual_seed(100 + index)
            return SkipStage(index, self.schedule.num_stages, self.skips, self.silent).double()

    def modules(self) -> list[SkipStage]:
        return [self.module(index) for index in range(self.schedule.num_stages)]

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        m = self.schedule.num_microbatches
        size = (2 + self.is_dynamic * step) * m + (not self.is_even)
        with torch.random.fork_rng():
            torch.manual_seed(step)
            x, target = torch.randn(2, size, WIDTH, dtype=torch.float64)
        return x, target

    @property
    def reduction(self) -> str:
        return "mean" if self.is_even else "sum"

    def loss_fn(self, outputs: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(outputs, target, reduction=self.reduction)

    def optimizer(self, modules: Sequence[nn.Module]) -> torch.optim.Optimizer:
        return make_optimizer(modules, len(self.batch(0)[0]), self.reduction)


def make_skip_pipeline(
    group: Group, run: SkipRun, modules: Sequence[SkipStage], **options: Any
) -> Pipeline:
    """One rank's pipeline of those of all `modules` that the schedule places there."""
    stages = [
        PipelineStage(
            modules[index],
            index,
            run.schedule.num_stages,
            CPU,
            group=group,
            dynamic_shapes=run.is_dynamic,
            skips_in=modules[index].skips_in,
            skips_out=modules[index].skips_out,
        )
        for index in run.schedule.placement.stages_of(rank_in(group))
    ]
    settings = {"loss_fn": run.loss_fn, "scale_grads": run.is_even, "timeout": HANG_S}
    return Pipeline(stages, run.schedule, **{**settings, **options})


def train_skips(group: Group, run: SkipRun) -> list[StepRecord]:
    """One rank's share of the steps of a run."""
    modules = run.modules()
    held = run.schedule.placement.stages_of(rank_in(group))
    own = {index: modules[index] for index in held}
    pipeline = make_skip_pipeline(group, run, modules)
    optimizer = run.optimizer(list(own.values()))
    records = []
    for step in range(run.num_steps):
        x, target = run.batch(step)
        losses: list[Tensor] = []
        if run.evaluates:
            outputs = pipeline.eval(x, target=target, losses=losses)
            records.append(StepRecord(outputs, losses))
            losses = []
        optimizer.zero_grad()
        if run.is_cut:
            m = run.schedule.num_microbatches
            args = [(part,) for part in split(x, m)]
            parts = pipeline.step_microbatches(args, targets=split(target, m), losses=losses)
            outputs = None if parts is None else torch.cat(parts)
        else:
            outputs = pipeline.step(x, target=target, losses=losses)
        records.append(StepRecord(outputs, losses, named_grads(own)))
        optimizer.step()
    return records


def compute_unsplit(modules: Sequence[SkipStage], x: Tensor) -> Tensor:
    """All stages in one graph; what skips some is handed over by name, not by place."""
    regular: tuple[Any, ...] = (x,)
    skipped: dict[int, dict[int, tuple[Any, ...]]] = {module.index: {} for module in modules}
    for module in modules:
        regular, given = module.compute(regular, skipped[module.index])
        for target, values in given.items():
            skipped[target][module.index] = values
    (y,) = regular
    return y  # type: ignore[no-any-return]


def train_skips_unsplit(run: SkipRun) -> list[StepRecord]:
    """The same of the model in one piece."""
    modules, m = run.modules(), run.schedule.num_microbatches
    optimizer = run.optimizer(modules)
    records = []
    for step in range(run.num_steps):
        x, target = run.batch(step)
        outputs = compute_unsplit(modules, x)
        optimizer.zero_grad()
        run.loss_fn(outputs, target).backward()
        outputs = outputs.detach()
        losses = list(map(run.loss_fn, split(outputs, m), split(target, m)))
        if run.evaluates:
            records.append(StepRecord(outputs, losses))
        records.append(StepRecord(outputs, losses, named_grads(dict(enumerate(modules)))))
        optimizer.step()
    return records


def assert_skips_like_unsplit(run: SkipRun, ranks: Sequence[Sequence[StepRecord]]) -> None:
    """Raises unless every step gave the outputs, losses and gradients of the unsplit model."""
    expected = train_skips_unsplit(run)
    for rank in ranks:
        assert len(expected) == len(rank)
    for number, wanted in enumerate(expected):
        found = [records[number] for records in ranks]
        assert_same_step(wanted, wanted.losses, found, f"record {number}")


def possible_skips(num_stages: int) -> list[tuple[int, int]]:
    return [(s, t) for s in range(num_stages) for t in range(s + 2, num_stages)]


def random_skips(num_stages: int, seed: int) -> tuple[Skip, ...]:
    """Some of all that are possible, at least one of them, of all kinds."""
    random = Random(seed)
    pairs = possible_skips(num_stages)
    chosen = random.sample(pairs, random.randint(1, min(len(pairs), 8)))
    kinds = random.sample(KINDS, len(KINDS)) * 2
    return tuple(Skip(*pair, kind) for pair, kind in zip(chosen, kinds, strict=False))
