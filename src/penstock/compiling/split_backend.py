"""The backend of torch.compile behind `penstock.compile`: inductor, with a backward in halves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from penstock.compiling.compiled_backward import CompiledBackward
from penstock.compiling.regions import Region
from penstock.torch_private.compiler import (
    compile_fx,
    compile_fx_inner,
    compiling_backward,
)


@dataclass(frozen=True, slots=True)
class SplitBackend:
    """A backend. Two with equal options are equal, so torch shares their code."""

    options: tuple[tuple[str, Any], ...] = ()
    memory_budget: float | None = None
    make_code: Callable[..., Any] = compile_fx_inner
    """Makes code of one graph: inductor."""

    def __call__(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        options = dict(self.options)
        values = [n for n, value in enumerate(inputs) if isinstance(value, nn.Parameter)]
        shapes = {n: inputs[n].shape for n in values if inputs[n].requires_grad}
        region = Region(_place(module), shapes, values)

        def compile_graph(graph: fx.GraphModule, inputs: Sequence[Any], **details: Any) -> Any:
            if details.get("is_backward"):
                return CompiledBackward(graph, inputs, details, region, options, self.make_code)
            return self.make_code(graph, inputs, **details)

        with compiling_backward(self.memory_budget):
            compiled = compile_fx(
                module, inputs, inner_compile=compile_graph, config_patches=options
            )
        return region.noting_calls(compiled)


def _place(module: fx.GraphModule) -> str:
    """Return where the region begins, for messages."""
    for node in module.graph.nodes:
        if node.op != "placeholder" and node.stack_trace:
            place = node.stack_trace.strip().splitlines()[0].strip()
            return f"the compiled region that begins at {place}"
    return "a compiled region"
