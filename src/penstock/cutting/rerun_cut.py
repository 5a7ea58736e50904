"""Cut a model between its layers without tracing: each stage runs the model's own forward."""

import logging
from collections.abc import Sequence
from copy import deepcopy
from functools import wraps
from typing import Any, NoReturn

from torch import Tensor, nn

from penstock.cutting.cut_model import CutModel, as_keywords
from penstock.cutting.cut_policies import Balanced
from penstock.cutting.hollow import Hollow
from penstock.cutting.model_names import Names
from penstock.cutting.repeated_inputs import RepeatedInputs
from penstock.cutting.rerun_stage import RerunStage, Spot, units_of
from penstock.cutting.shape_counts import LayerCost
from penstock.cutting.trial_stage import TrialStage
from penstock.cutting.unit_calls import (
    Recording,
    attributes_kept,
    catch_calls,
    example_device,
    record_calls,
)
from penstock.errors import PartitionError, PipelineError
from penstock.ir import StageId
from penstock.stage.unchanged import kept_as_it_was
from penstock.torch_private import (
    hooks_of_calls,
    own_buffers,
    own_parameters,
    pytree,
    set_hooks_of_calls,
)

LOGGER = logging.getLogger("penstock")
_STAGE, _HOOKS, _RECEIVED = "penstock_stage", "penstock_hooks", "penstock_received"


def cut_between_layers(
    model: nn.Module,
    stages: int | Balanced,
    mb_args: tuple[Any, ...] = (),
    mb_kwargs: dict[str, Any] | None = None,
) -> CutModel:
    """Cut a model between entries of its module lists, without tracing it.

    `mb_args` and `mb_kwargs` are an example of one microbatch, which the model is run on. Each
    stage runs the model's own forward, with the layers of other stages left out. Modules stay as
    they are, with their hooks and checkpoints. Every stage takes the model's inputs by keyword:
    give them to `step` on every rank.

        >>> import torch
        >>> class Block(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return super().forward(x) if x.isfinite().all() else x  # Not traceable.
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.blocks = torch.nn.ModuleList(Block(4, 4) for _ in range(4))
        ...     def forward(self, x):
        ...         for block in self.blocks:
        ...             x = block(x)
        ...         return x
        >>> pipe = cut_between_layers(Model(), 2, (torch.ones(2, 4),))
        >>> print(pipe.info())
        stage 0: 40 parameters
        stage 1, from blocks.2: 40 parameters
          receives an input of blocks.2
    """
    policy = Balanced(stages) if isinstance(stages, int) else stages
    kwargs = as_keywords(model, mb_args, mb_kwargs or {})
    if example_device(model).type == "meta":
        kwargs = pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), kwargs)
    recording = record_calls(model, kwargs, policy.num_stages)
    joined: set[int] = set()
    while True:
        starts = _choose(model, recording, policy, joined)
        try:
            return _Cut(model, recording, starts, kwargs).make()
        except _Impossible as exc:
            # This place is one where values cross that cannot be sent: never cut there.
            LOGGER.info("%s is not cut at %s: %s", type(model).__name__, exc.name, exc.__cause__)
            joined.add(exc.start)
            if exc.start == 0 or len(recording.calls) - len(joined) < policy.num_stages:
                _give_up(model, exc)


def _choose(
    model: nn.Module, recording: Recording, policy: Balanced, joined: set[int]
) -> list[int]:
    """Return the calls at which stages begin; none begins at a call in `joined`."""
    firsts = [n for n in range(len(recording.calls)) if n not in joined]
    if len(firsts) < policy.num_stages:
        raise PartitionError(
            f"{type(model).__name__} calls {len(firsts)} entries of module lists, too few for "
            f"{policy.num_stages} stages. Cut it by hand."
        )
    ends = [*firsts[1:], len(recording.calls)]
    groups = [recording.calls[first:end] for first, end in zip(firsts, ends, strict=True)]
    names = [group[0].name for group in groups]
    costs: Sequence[LayerCost | float]
    if policy.costs is not None:
        costs = policy.costs
        if joined and len(costs) == len(recording.calls):
            times = [cost.time if isinstance(cost, LayerCost) else cost for cost in costs]
            costs = [sum(times[first:end]) for first, end in zip(firsts, ends, strict=True)]
    else:
        counted = [
            LayerCost(
                group[0].name,
                sum(call.cost.time for call in group),
                sum(call.cost.parameter_bytes for call in group),
                sum(call.cost.activation_bytes for call in group),
            )
            for group in groups
        ]
        costs = policy.with_loss(counted, recording.outputs) if recording.is_counted else counted
    return [firsts[start] for start in policy.choose(costs, names)]


class _Impossible(Exception):
    """A stage cannot begin at this call."""

    def __init__(self, start: int, name: str) -> None:
        super().__init__(name)
        self.start, self.name = start, name


def _give_up(model: nn.Module, exc: _Impossible) -> NoReturn:
    raise PartitionError(
        f"{type(model).__name__} cannot be cut between its layers. At {exc.name}: {exc.__cause__}"
    ) from exc


class _Cut:
    """A cut at given calls, and the modules of its stages."""

    def __init__(
        self, model: nn.Module, recording: Recording, starts: list[int], kwargs: dict[str, Any]
    ) -> None:
        self._model, self._recording, self._kwargs = model, recording, kwargs
        ends = [*starts[1:], len(recording.calls)]
        self._ranges = [range(start, end) for start, end in zip(starts, ends, strict=True)]
        self._ranges[0] = range(0, ends[0])
        self._names = Names(model)
        self._holders = self._find_holders()

    def make(self) -> CutModel:
        """Return the cut model; raise an error if values cross that cannot be sent."""
        inputs = RepeatedInputs(self._kwargs, self._recording.written)
        trials: list[TrialStage] = []
        for stage, own in enumerate(self._ranges):
            trial = TrialStage(stage, own, self._recording.calls, inputs, trials)
            self._try(trial)
            trials.append(trial)
        given: dict[tuple[StageId, StageId], list[Spot]] = {}
        for trial in trials:
            for source, spot in zip(trial.sources, trial.received, strict=True):
                given.setdefault((source, trial.stage), []).append(spot)
        for stage, own in enumerate(self._ranges[1:], 1):
            if (stage - 1, stage) not in given:
                raise self._impossible(own) from PartitionError(
                    f"stage {stage} would receive nothing from stage {stage - 1}."
                )
        modules, tied = [], []
        for stage, own in enumerate(self._ranges):
            run = RerunStage(stage, own, self._recording.calls, inputs)
            run.watches_draws = trials[stage].watches_draws
            pairs = sorted(given)
            run.received = [s for pair in pairs if pair[1] == stage for s in given[pair]]
            run.given = [s for pair in pairs if pair[0] == stage for s in given[pair]]
            module, ties = self._module(stage, run)
            modules.append(module)
            tied.append(ties)
        starts = [self._recording.calls[own.start].name for own in self._ranges[1:]]
        described = {pair: [*map(self._describe, spots)] for pair, spots in given.items()}
        pieces = CutModel(modules, tied, starts, described)
        pieces.repeats_inputs = True
        return pieces

    def _describe(self, spot: Spot) -> str:
        number, _ = spot
        calls = self._recording.calls
        return f"an input of {calls[number].name}" if number < len(calls) else "an output"

    def _impossible(self, own: range) -> _Impossible:
        return _Impossible(own.start, self._recording.calls[own.start].name)

    def _try(self, trial: TrialStage) -> None:
        """Run a stage on the example, with the values that earlier ones had."""
        module, _ = self._module(trial.stage, trial, is_trial=True)
        draws = trial.watch_draws(is_trial=True)
        try:
            with attributes_kept(module), kept_as_it_was(module), draws:
                module(**self._kwargs)
        except PipelineError as exc:
            if not trial.has_given:
                raise self._impossible(trial.own) from exc
        except Exception as exc:
            if trial.has_given:
                return
            reason = PartitionError(f"{type(exc).__name__}: {exc}")
            reason.__cause__ = exc
            raise self._impossible(trial.own) from reason
        finally:
            trial.watches_draws = draws.has_found

    def _find_holders(self) -> dict[Tensor, list[StageId]]:
        """Return the stages that hold each parameter and buffer."""
        holders: dict[Tensor, list[StageId]] = {}
        everywhere = list(range(len(self._ranges)))
        for tensor, uses in self._recording.uses.items():
            stages = [s for s, own in enumerate(self._ranges) if not uses.calls.isdisjoint(own)]
            is_buffer = not isinstance(tensor, nn.Parameter)
            if is_buffer and uses.is_written and len(stages) > 1:
                raise PartitionError(
                    f"the forward of {type(self._model).__name__} changes the buffer "
                    f"{self._names.of(tensor)[0]}, which stages {stages[0]} and {stages[1]} use, "
                    "and each would have its own copy. Cut the model elsewhere."
                )
            if is_buffer and uses.is_outside and not uses.is_written:
                stages = everywhere
            holders[tensor] = stages
        for tensor in self._names:
            if tensor in holders:
                continue
            if stages := self._stages_calling(self._names.of(tensor)):
                holders[tensor] = stages  # Of an expert that the example did not take, say.
            elif not isinstance(tensor, nn.Parameter):
                holders[tensor] = everywhere
        self._names.add_unused(holders)
        return holders

    def _stages_calling(self, names: Sequence[str]) -> list[StageId]:
        """Return the stages that call units which have a parameter or buffer of these names."""
        calls = self._recording.calls
        return [
            stage
            for stage, own in enumerate(self._ranges)
            if any(name.startswith(f"{calls[n].name}.") for n in own for name in names)
        ]

    def _module(
        self, stage: StageId, run: RerunStage, *, is_trial: bool = False
    ) -> tuple[nn.Module, dict[str, str]]:
        """Return the module of a stage, and the names that its tied parameters share."""
        memo: dict[int, Any] = {}
        ties: dict[str, str] = {}
        for tensor in self._names:
            holders, names = self._holders[tensor], self._names.of(tensor)
            if stage not in holders:
                memo[id(tensor)] = Hollow.like(tensor, names[0], run.whereabouts)
            elif not isinstance(tensor, nn.Parameter) or holders[0] == stage or is_trial:
                memo[id(tensor)] = tensor
            else:
                memo[id(tensor)] = nn.Parameter(tensor.detach().clone(), tensor.requires_grad)
            if isinstance(tensor, nn.Parameter) and stage in holders and len(holders) > 1:
                ties[names[0]] = names[0]
        memo.update(self._hollow_attributes(run))
        module = deepcopy(self._model, memo)
        for part in module.modules():
            _move_hollow(part)
        for name in units_of(self._recording.calls):
            catch_calls(module.get_submodule(name), name, run)
        _catch_model(module, run)
        return module, ties

    def _hollow_attributes(self, run: RerunStage) -> dict[int, Any]:
        """Return hollow tensors for tensors that units of other stages have as attributes."""
        calls = self._recording.calls
        own = {calls[number].name for number in run.own}
        found: dict[int, Any] = {}
        for name in units_of(calls):
            for part in self._model.get_submodule(name).modules() if name not in own else ():
                for value in vars(part).values():
                    if isinstance(value, Tensor):
                        found[id(value)] = Hollow.like(value, name, run.whereabouts)
        return found


def _move_hollow(module: nn.Module) -> None:
    """Let hollow parameters and buffers be plain attributes, which are not listed or saved."""
    for registered in (own_parameters(module), own_buffers(module)):
        for name, tensor in list(registered.items()):
            if isinstance(tensor, Hollow):
                del registered[name]
                vars(module)[name] = tensor


def _catch_model(module: nn.Module, run: RerunStage) -> None:
    """Let a call of the module be a forward of the stage.

    The hooks that the model has run around its own forward. Those that the module gets later, as
    from fully_shard, run around the stage: they see the model's inputs, and what the stage gives.
    """
    kind = type(module)

    def call_stage(self: nn.Module, *received: Any, **inputs: Any) -> Any:
        vars(self)[_RECEIVED] = received
        return nn.Module.__call__(self, **inputs)

    @wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **inputs: Any) -> Any:
        own = vars(self)
        received = own.pop(_RECEIVED, None)
        if received is None:  # The model's own call has come to its forward.
            return kind.forward(self, *args, **inputs)

        def call_model(**inputs: Any) -> Any:
            around = hooks_of_calls(self)
            set_hooks_of_calls(self, own[_HOOKS])
            try:
                return kind.__call__(self, **inputs)
            finally:
                set_hooks_of_calls(self, around)

        return own[_STAGE](call_model, received, inputs)

    hooks = hooks_of_calls(module)
    set_hooks_of_calls(module, [type(each)() for each in hooks])
    vars(module).update({_STAGE: run, _HOOKS: hooks})
    methods = {"__call__": call_stage, "forward": forward, "__module__": kind.__module__}
    module.__class__ = type(kind.__name__, (kind,), methods)
