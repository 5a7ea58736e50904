"""The engine that a runtime uses: the split backward of a module that runs again and again.

It controls the forward too, so most weight gradients never enter the graph (see
`leaf_modules`); what is left is found as the functions find it (see `harvest`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from penstock.backward.functions import differentiable, explained, in_place_of
from penstock.backward.harvest import gradient_edge
from penstock.backward.input_half import Plan, hooks_put_off, input_half, plan_for
from penstock.backward.leaf_modules import Sink, Tap, deferring_forwards
from penstock.backward.settle import settle, value_of
from penstock.backward.sources import Terms
from penstock.backward.structure import pair_with_grads, tensors_in
from penstock.errors import BackwardError

InputGrads: TypeAlias = tuple[Tensor | None, ...]


class SplitEngine:
    """Prepares a stage's module once; then runs forwards whose backward comes in two halves.

    The module itself stays as it is: what the engine changes is in force only while one
    of its calls runs. Prepare the engine after wrapping the module (DDP, say), and run
    the module through it alone.

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

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._sink = Sink()
        self._forwards = deferring_forwards(module, self._sink)
        self._params = list(module.parameters())
        self._signals = any(_is_held(param) for param in self._params if param.requires_grad)
        self._must_walk = True

    def forward(self, *args: Any, **kwargs: Any) -> "ForwardPass":
        """Run the module. The returned pass holds the outputs and runs their backward."""
        taps: list[Tap] = []
        self._sink.taps = taps
        try:
            with self._deferring():
                outputs = self.module(*args, **kwargs)
        finally:
            self._sink.taps = None
        inputs = tensors_in((args, kwargs))
        outside = {x.grad_fn for x in inputs}
        for output in tensors_in(outputs):
            if output.grad_fn is not None and output.grad_fn not in outside:
                output.grad_fn.register_prehook(self._refuse_direct_backward)
        return ForwardPass(self, outputs, inputs, taps)

    def _refuse_direct_backward(self, _: Any) -> None:
        self._sink.check_open()

    def _input_half(
        self,
        roots: Sequence[Tensor],
        root_grads: Sequence[Tensor],
        inputs: Sequence[Tensor],
        taps: Sequence[Tap],
    ) -> tuple[Sequence[Tensor | None], tuple[Terms, Terms]]:
        """The inputs' gradients, and in one engine pass the weights' terms and tails.

        Tails are terms that go to a place in the graph, which W will run from there.
        """
        params = [param for param in self._params if param.requires_grad]
        edges = [GradientEdge(tap.node, 0) for tap in taps]
        plan = Plan([], params)
        if self._must_walk and inputs:
            # What leads to a tap runs in this pass and is released, so it cannot wait.
            plan = plan_for(roots, [*map(gradient_edge, inputs), *edges], params)
            self._must_walk = bool(plan.waiting)
        terms: Terms = []
        with self._collecting(terms), explained(roots):
            input_grads, tap_grads, urgent_grads, groups = input_half(
                plan, roots, root_grads, inputs, edges
            )
        for tap, grad in zip(taps, tap_grads, strict=True):
            if grad is not None:
                tap.add_terms(grad, terms)
        for param, grad in zip(plan.urgent, urgent_grads, strict=True):
            if grad is not None:
                terms.append((param, grad))
        found: Terms = []
        for group in groups:
            group.add_terms(found)
        tails = [term for term in found if isinstance(term[0], GradientEdge)]
        terms += [term for term in found if not isinstance(term[0], GradientEdge)]
        return input_grads, (terms, tails)

    def _settle(self, terms: Terms, tails: Terms) -> None:
        if tails:
            self._run_on(tails, terms)
        settle(terms, (), signal_accumulators=self._signals)

    def _run_on(self, tails: Terms, terms: Terms) -> None:
        """Run the graph where it was left, and add what it gives and what leaf modules put off."""
        edges: Any = [edge for edge, _ in tails]
        grads = [value_of(term) for _, term in tails]
        params = [param for param in self._params if param.requires_grad]
        with self._collecting(terms), hooks_put_off(params):
            found = torch.autograd.grad(edges, params, grads, allow_unused=True)
        terms += [(p, g) for p, g in zip(params, found, strict=True) if g is not None]

    @contextmanager
    def _collecting(self, terms: Terms) -> Iterator[None]:
        """Let a backward run: leaf modules add to `terms` what they put off."""
        self._sink.terms = terms
        try:
            with self._deferring():
                yield
        finally:
            self._sink.terms = None

    @contextmanager
    def _deferring(self) -> Iterator[None]:
        """Let leaf modules put off their weight gradients, here and in recomputations."""
        for module, forward in self._forwards:
            module.__dict__["forward"] = forward
        try:
            yield
        finally:
            for module, _ in self._forwards:
                del module.__dict__["forward"]


class ForwardPass:
    """One microbatch's forward: its outputs, and its backward, which can be run once.

    `outputs` is what the module returned; `inputs` lists the tensors it was given, in
    order, nested ones and keyword arguments included. The backward must be run from here:
    the graph of the outputs alone does not lead to the weights.
    """

    def __init__(
        self, engine: SplitEngine, outputs: Any, inputs: list[Tensor], taps: list[Tap]
    ) -> None:
        self.outputs = outputs
        self.inputs = inputs
        self._engine = engine
        self._taps = taps
        self._is_done = False

    def backward_input(
        self, output_grads: Any = None, *, loss: Any = None
    ) -> tuple[InputGrads, "PendingWeights"]:
        """The input half: gradients of `inputs`, and the weight half, pending.

        Give either `output_grads`, which mirrors the outputs (None for an output that
        nobody used), or the `loss` that was computed from the outputs.
        """
        roots, root_grads = self._start(output_grads, loss)
        engine, inputs, taps = self._engine, differentiable(self.inputs), self._taps
        self._taps = []
        if not inputs:

            def whole_backward() -> tuple[Terms, Terms]:
                return engine._input_half(roots, root_grads, (), taps)[1]

            return (None,) * len(self.inputs), PendingWeights(engine, whole_backward)
        grads, work = engine._input_half(roots, root_grads, inputs, taps)
        pending = PendingWeights(engine, lambda: work)
        return in_place_of(self.inputs, inputs, grads), pending

    def backward(self, output_grads: Any = None, *, loss: Any = None) -> InputGrads:
        """The full backward: both halves, one after the other."""
        input_grads, pending = self.backward_input(output_grads, loss=loss)
        pending.run()
        return input_grads

    def _start(self, output_grads: Any, loss: Any) -> tuple[list[Tensor], list[Tensor]]:
        if (output_grads is None) == (loss is None):
            raise BackwardError(
                f"got {'neither output_grads nor' if loss is None else 'both output_grads and'} "
                "a loss; expected one of them. Give output_grads in the middle of a pipeline, "
                "the loss on its last stage."
            )
        if self._is_done:
            raise BackwardError(
                "the backward of this forward pass has run already, and its graph is released. "
                "Run the engine's forward again."
            )
        pairs = pair_with_grads(self.outputs if loss is None else loss, output_grads)
        self._is_done = True
        self.outputs = None
        return pairs


class PendingWeights:
    """What an input backward left to be done. Run it once, at any later time."""

    def __init__(self, engine: SplitEngine, work: Callable[[], tuple[Terms, Terms]]) -> None:
        self._engine = engine
        self._work: Callable[[], tuple[Terms, Terms]] | None = work

    def run(self) -> None:
        """Add the weight gradients to the parameters' `.grad`, run hooks, free everything."""
        if self._work is None:
            raise BackwardError(
                "this weight backward has run already. Run each PendingWeights once: every "
                "backward_input() returns one of its own."
            )
        work, self._work = self._work, None
        self._engine._settle(*work())


def _is_held(param: Tensor) -> bool:
    """Whether someone keeps the parameter's accumulator, as those who put hooks on it must."""
    mark = "penstock.backward"
    _metadata(param)[mark] = True
    return mark in _metadata(param)


def _metadata(param: Tensor) -> dict[Any, Any]:
    """The notes that anyone may leave on the parameter's accumulator; they die with it."""
    metadata: dict[Any, Any] = gradient_edge(param).node.metadata  # type: ignore[assignment]  # a property
    return metadata
