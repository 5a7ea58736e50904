"""The engine that a runtime uses: the split backward of a module that runs many times.

It controls the forward too, so most weight gradients never enter the graph (see
`leaf_modules`). It finds the rest in the same way as the functions do (see `harvest`).
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.nn.parameter import is_lazy

from penstock.backward.compiled_calls import CompiledCalls, WaitingCall, note_calls_in, stop_noting
from penstock.backward.graph_pattern import gradient_edge
from penstock.backward.groups import ParamGroup
from penstock.backward.input_half import HalfPlan, plan_for, run_input_half
from penstock.backward.leaf_modules import Sink, Tap, add_terms, find_leaf_modules
from penstock.backward.settling import carry_on, settle_all
from penstock.backward.sharding import Sharding
from penstock.backward.sources import WeightWork
from penstock.backward.structure import (
    differentiable,
    pair_with_grads,
    spread_over,
    tensors_in,
)
from penstock.backward.terms import Unmodified
from penstock.backward.translate import Translated
from penstock.backward.wrappers import find_wrapper
from penstock.errors import BackwardError
from penstock.sealed import Sealed
from penstock.torch_private import hooks_of_all_calls, own_parameters, pytree, sequence_number

InputGrads: TypeAlias = tuple[Tensor | None, ...]


class SplitEngine(Sealed):
    """The split backward of one stage's module: prepared once, used for every forward.

    The module itself is not changed: the engine's patches apply only while one of its calls
    runs. Prepare the engine when the module is complete: wrapped (in DDP, for example), and lazy
    modules initialised. If modules are added, replaced or wrapped later, prepare another engine.
    After converting parameters in place (with `half()`, for example), call `refresh()`.
    A `PipelineStage` does both itself. The first forward is checked more closely than later ones.

        >>> import torch
        >>> engine = SplitEngine(torch.nn.Linear(2, 2))
        >>> x = torch.randn(3, 2, requires_grad=True)
        >>> forward = engine.forward(x)
        >>> (dx,), pending = forward.backward_input(torch.ones(3, 2))
        >>> engine.module.weight.grad is None
        True
        >>> pending.run()
        >>> engine.module.weight.grad.shape
        torch.Size([2, 2])
    """

    def __init__(self, module: nn.Module, sharding: Sharding | None = None) -> None:
        for name, param in module.named_parameters():
            if is_lazy(param):
                raise BackwardError(
                    f"parameter {name} is lazy and has no shape yet; expected parameters that "
                    "are initialised. Run the module once before preparing the engine."
                )
        if (found := find_wrapper(module)) is not None:
            name, wrapper = found
            raise BackwardError(
                f"the module has {wrapper}{f' on {name!r}' if name else ''}, whose split "
                "backward is not supported: gradients would be reduced before they are complete. "
                "Use stage_backward, or a module without it."
            )
        if sharding is None and Sharding(module):
            raise BackwardError(
                "the module is sharded by fully_shard (FSDP2) or replicate, whose gradients are "
                "reduced once in a step, which an engine alone does not know. Put the module into "
                "a PipelineStage and run it in a Pipeline."
            )
        self._sharding = sharding
        self.module = module
        self._sink = Sink()
        self._leaves = find_leaf_modules(module, self._sink)
        # The modules' own dicts, where a forward comes before that of the class.
        self._patches = [(leaf.module.__dict__, leaf.forward) for leaf in self._leaves]
        # Live dicts: they show replaced parameters, and are faster than module.parameters().
        self._parameters = [own for m in module.modules() if (own := own_parameters(m))]
        self._signals = any(_is_held(param) for param in self._trainable())
        self._must_walk = True
        self._must_gather = False
        self._seal()

    def forward(self, *args: Any, **kwargs: Any) -> "PendingBackward":
        """Run the module. The returned object holds the outputs and runs their backward."""
        taps: list[Tap] = []
        calls = CompiledCalls()
        token = object()
        inputs = tensors_in(args if len(args) != 1 else args[0]) + tensors_in(kwargs)
        if hooks_of_all_calls:
            args, kwargs = pytree.tree_map_only(Tensor, _not_leaf, (args, kwargs))
        self._sink.taps, self._sink.owner = taps, token
        patched = self._patch()
        noted = note_calls_in(calls)
        try:
            outputs = self.module(*args, **kwargs)
        finally:
            stop_noting(noted)
            _remove(patched)
            self._sink.taps = self._sink.owner = None
        self._sink.is_wary = False
        outside = {x.grad_fn for x in inputs}
        for output in tensors_in(outputs):
            if output.grad_fn is not None and output.grad_fn not in outside:
                output.grad_fn.register_prehook(self._sink.refusal_unless(token))
        return PendingBackward(self, outputs, inputs, taps, calls, token)

    def __reduce__(self) -> tuple[type["SplitEngine"], tuple[nn.Module]]:
        """Build a copy from its module: leaf modules refer to the engine they were made for."""
        return SplitEngine, (self.module,)

    def refresh(self) -> None:
        """Look at the parameters again; they may have been converted in place."""
        for leaf in self._leaves:
            leaf.params.refresh()

    def _trainable(self) -> list[Tensor]:
        wanted: list[Tensor]
        if self._sharding is None:
            wanted = [
                param
                for own in self._parameters
                for param in own.values()
                if param is not None and param.requires_grad
            ]
        else:
            found = self._sharding.used_parameters(self._parameters)
            wanted = [param for param in found if param is not None and param.requires_grad]
        if len(set(map(id, wanted))) == len(wanted):
            return wanted
        return list({id(param): param for param in wanted}.values())

    @property
    def needs_parameters(self) -> bool:
        """Return whether the weight half uses values of parameters, not only their shapes.

        Known after the first input half. It does where products were found in the graph, or where
        a compiled weight half takes parameters.
        """
        return self._must_walk or self._must_gather

    def _input_half(
        self,
        roots: Sequence[Tensor],
        root_grads: Sequence[Tensor],
        inputs: Sequence[Tensor],
        taps: list[Tap],
        calls: CompiledCalls,
        token: object,
    ) -> tuple[Sequence[Tensor | None], "_Remainder"]:
        """Return the inputs' gradients and the work left for W, from one engine pass."""
        params = self._trainable()
        edges = [GradientEdge(tap[0], 0) for tap in taps]
        plan = HalfPlan((), params)
        if self._must_walk and inputs:
            # Nodes that lead to a tap run in this pass and are released, so they cannot wait.
            plan = plan_for(roots, inputs, params, [tap[0] for tap in taps])
            self._must_walk = bool(plan.waiting)
        can_split = inputs and calls.is_any_noted
        splitting = calls.splitting(params) if can_split else nullcontext()
        with self._running(token), Translated(roots), splitting:
            input_grads, tap_grads, urgent_grads, groups = run_input_half(
                plan, roots, root_grads, inputs, edges
            )
        work = WeightWork([], [])
        arrived = [(p, g) for p, g in zip(plan.urgent, urgent_grads, strict=True) if g is not None]
        needed = [grad for _, grad in arrived]
        waiting = calls.take()
        if calls.needs_parameters:
            self._must_gather = True
        are_apart = not groups and _are_apart(waiting, taps, arrived)
        # In autograd's order, last first: a weight that several layers share is summed that way.
        in_order = deque(() if are_apart else waiting)
        for tap, grad in zip(reversed(taps), reversed(tap_grads), strict=True):
            while in_order and in_order[0].sequence_number > sequence_number(tap[0]):
                in_order.popleft().add_terms(work.terms)
            if grad is not None:
                needed += add_terms(tap, grad, work.terms)
        for call in in_order:
            call.add_terms(work.terms)
        work.terms.extend(arrived)
        return input_grads, _Remainder(work, groups, waiting, are_apart, Unmodified(needed))

    def _settle(self, remainder: "_Remainder", token: object) -> None:
        """Do the remaining work: the weight backward."""
        work, groups, calls, are_apart, unmodified = remainder
        unmodified.check()
        if groups:
            params = self._trainable()
            known = set(map(id, params))
            for group in groups:
                group.check(known)
                group.add_work(work)
            if work.tails:
                with self._gathered(), self._running(token):
                    work.terms.extend(carry_on(work.tails, params))
        with self._gathered() if self._must_gather else nullcontext():
            own = ((call.compute(), True) for call in calls if are_apart)
            settle_all(
                chain(own, [(work.terms, False)]),
                signal_accumulators=self._signals,
                recheck=unmodified.check,
            )

    def _gathered(self) -> AbstractContextManager[None]:
        """Hold the values of all parameters, for a graph that leads through them."""
        return nullcontext() if self._sharding is None else self._sharding.gathered()

    @contextmanager
    def _running(self, token: object) -> Iterator[None]:
        """Allow the backward of a pass to run, including recomputations."""
        self._sink.owner = token
        patched = self._patch()
        try:
            yield
        finally:
            _remove(patched)
            self._sink.owner = None

    def _patch(self) -> list[dict[str, Any]]:
        """Let leaf modules defer their weight gradients until `_remove`; return their dicts."""
        # The user's own patch comes first.
        return [own for own, new in self._patches if own.setdefault("forward", new) is new]


def _remove(patched: list[dict[str, Any]]) -> None:
    for own in patched:
        del own["forward"]


def _are_apart(
    calls: list[WaitingCall], taps: list[Tap], arrived: Iterable[tuple[Tensor, Tensor]]
) -> bool:
    """Return whether no weight of these calls is used anywhere else, or in two of them.

    Then each call's gradients can be added by themselves; others must be summed first.
    """
    if not calls:
        return True
    own = [id(param) for call in calls for param in call.params]
    others = {id(param) for param, _ in arrived}
    for _, call, _, _ in taps:
        others |= {id(call.weight), id(call.bias)}
    return len(set(own)) == len(own) and others.isdisjoint(own)


class _Remainder(NamedTuple):
    """The work that an input backward leaves, and a check that nobody overwrites its tensors.

    `are_apart`: nobody else uses the weights of the compiled calls, so their terms are not in the
    work.
    """

    work: WeightWork
    groups: list[ParamGroup]
    calls: Sequence[WaitingCall]
    are_apart: bool
    unmodified: Unmodified

    @property
    def held(self) -> list[Tensor]:
        """The tensors that the products need."""
        return self.unmodified.tensors + [x for call in self.calls for x in call.unmodified.tensors]

    def is_empty(self) -> bool:
        return not (self.work.terms or self.work.tails or self.groups or self.calls)


class PendingBackward:
    """One microbatch's forward: its outputs, and its backward, which can be run once.

    `outputs` is what the module returned. `inputs` lists the tensors it was given, in order,
    including those in tuples, lists, dicts and keyword arguments. The backward must be run
    from here: the graph of the outputs alone does not lead to the weights.
    """

    def __init__(
        self,
        engine: SplitEngine,
        outputs: Any,
        inputs: list[Tensor],
        taps: list[Tap],
        calls: CompiledCalls,
        token: object,
    ) -> None:
        self.outputs = outputs
        self.inputs = inputs
        self._engine = engine
        self._taps: list[Tap] | None = taps
        self._calls = calls
        self._token = token

    @property
    def has_split_regions(self) -> bool:
        """True if the forward has run regions that `penstock.compile` compiled."""
        return self._calls.is_any_noted

    def rerunning(self) -> AbstractContextManager[None]:
        """Return a context for running modules of the forward again, to fill in what it saved."""
        return self._engine._running(self._token)

    def backward_input(
        self, output_grads: Any = None, *, loss: Any = None
    ) -> tuple[InputGrads, "PendingWeights"]:
        """Run the input backward; return the gradients of `inputs` and the weight backward.

        Give either `output_grads`, which mirrors the outputs (None for an output that
        nobody used), or the `loss` that was computed from the outputs. If no input needs
        a gradient, the whole backward is left to the weight backward, which holds the graph.
        """
        if (output_grads is None) == (loss is None):
            raise BackwardError(
                f"got {'neither output_grads nor' if loss is None else 'both output_grads and'} "
                "a loss; expected one of them. Give output_grads in the middle of a pipeline, "
                "the loss on its last stage."
            )
        if self._taps is None:
            raise BackwardError(
                "the backward of this forward pass has run already, and its graph is released. "
                "Run the engine's forward again."
            )
        roots, root_grads = pair_with_grads(self.outputs if loss is None else loss, output_grads)
        engine, token, inputs = self._engine, self._token, differentiable(self.inputs)
        taps, calls = self._taps, self._calls
        self._taps = self.outputs = None
        if not inputs:

            def run_all() -> None:
                _, remainder = engine._input_half(roots, root_grads, (), taps, calls, token)
                engine._settle(remainder, token)

            return (None,) * len(self.inputs), PendingWeights(run_all, ())
        grads, remainder = engine._input_half(roots, root_grads, inputs, taps, calls, token)
        if loss is not None and remainder.is_empty() and not any(g is not None for g in grads):
            raise BackwardError(
                "the loss does not depend on any input or weight of this forward pass. Expected "
                "a loss computed from its own outputs; pass it to the PendingBackward it came from."
            )
        pending = PendingWeights(lambda: engine._settle(remainder, token), remainder.held)
        return spread_over(self.inputs, inputs, grads), pending

    def backward(self, output_grads: Any = None, *, loss: Any = None) -> InputGrads:
        """Run the full backward: both halves, one after the other."""
        input_grads, pending = self.backward_input(output_grads, loss=loss)
        pending.run()
        return input_grads


class PendingWeights:
    """The weight backward that an input backward left. Run it once, at any later time.

    `held` lists tensors that it holds until then, where the input backward had products to leave.
    """

    def __init__(self, work: Callable[[], None], held: Sequence[Tensor]) -> None:
        self._work: Callable[[], None] | None = work
        self.held = held

    def run(self) -> None:
        """Add the weight gradients to the parameters' `.grad`, run hooks, free everything."""
        if self._work is None:
            raise BackwardError(
                "this weight backward has run already. Run each PendingWeights once: every "
                "backward_input() returns its own."
            )
        work, self._work = self._work, None
        self.held = ()
        work()


def _not_leaf(tensor: Tensor) -> Tensor:
    """Return a view in place of a leaf that needs a gradient.

    FlopCounterMode and CommDebugMode put multi-grad hooks on what modules are called with. On a
    leaf, such a hook fails in a pass that is asked for the leaf's gradient, as the input half is.
    """
    return tensor.view_as(tensor) if tensor.is_leaf and tensor.requires_grad else tensor


def _is_held(param: Tensor) -> bool:
    """Return whether anything holds the parameter's accumulator, as code with hooks on it must."""
    mark = "penstock.backward"
    _notes_on(param)[mark] = True
    return _notes_on(param).pop(mark, False)


def _notes_on(param: Tensor) -> dict[str, bool]:
    """Return the metadata of the parameter's accumulator, which disappears with it."""
    notes: dict[str, bool] = gradient_edge(param).node.metadata  # type: ignore[assignment]  # a property
    return notes
