"""The private names of torch's compiler, which takes seconds to load.

It is imported when something is first compiled. Public: none of these names; torch has no public
way to put anything between a compiled backward's graph and the code that runs it.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from penstock.torch_private import load_names

_COMPILE_FX = "torch._inductor.compile_fx"
NAMES_OF_COMPILER = (
    f"{_COMPILE_FX}:compile_fx",
    f"{_COMPILE_FX}:compile_fx_inner",
    "torch._inductor:config",
    "torch._functorch:config",
    "torch._functorch._aot_autograd.descriptors:GradAOTOutput",
    "torch._functorch._aot_autograd.descriptors:PlainAOTInput",
    "torch._guards:CompileContext",
    "torch._guards:TracingContext",
    "torch._guards:compile_context",
    "torch._guards:tracing",
    "torch._dynamo.convert_frame:compile_lock",
    "torch:_TorchCompileInductorWrapper",
    "torch._C:_DisableAutocast",
    "torch._C:_autograd._get_sequence_nr",
)
with warnings.catch_warnings():
    # While it loads, torch's compiler warns of parts of torch that it uses itself.
    warnings.simplefilter("ignore", DeprecationWarning)
    _found = load_names(NAMES_OF_COMPILER)
(
    compile_fx,
    compile_fx_inner,
    _inductor_config,
    _functorch_config,
    _GradAOTOutput,
    _PlainAOTInput,
    _CompileContext,
    _TracingContext,
    _compile_context,
    _tracing,
    _compile_lock,
    _InductorOptions,
    _DisableAutocast,
    next_sequence_number,
) = _found


def inductor_options(
    mode: str | None, options: dict[str, Any] | None, dynamic: bool | None
) -> dict[str, Any]:
    """Return what `mode` and `options` of torch.compile mean, checked as torch does."""
    found: dict[str, Any] = _InductorOptions(mode, options, dynamic).config
    return found


@contextmanager
def compiling_backward(memory_budget: float | None) -> Iterator[None]:
    """Compile in a way that lets us handle the backward: without the cache of whole functions.

    The cache of compiled graphs stays in use. `memory_budget`: which share of the activations the
    forward may keep; the backward computes the others again.
    """
    settings: dict[str, Any] = {"enable_autograd_cache": False}
    if memory_budget is not None:
        settings["activation_memory_budget"] = memory_budget
    with _functorch_config.patch(settings):
        yield


class Setting(NamedTuple):
    """Everything around the compilation of a backward, which may happen later."""

    tracing: Any
    compiling: Any
    options: dict[str, Any]

    @classmethod
    def now(cls, options: dict[str, Any]) -> "Setting":
        return cls(_TracingContext.try_get(), _CompileContext.try_get(), options)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the compilation that this was taken from, unless it is still running."""
        is_over = self.tracing is not _TracingContext.try_get()
        with (
            _compile_lock,
            _tracing(self.tracing) if is_over else nullcontext(),
            _compile_context(self.compiling),
            _DisableAutocast(),
            _inductor_config.patch(self.options),
            torch.no_grad(),
        ):
            yield

    @contextmanager
    def overwriting_nothing(self) -> Iterator[None]:
        """Let code that is compiled now leave its inputs as they are.

        Otherwise it may overwrite what the forward has saved.
        """
        data = None if self.tracing is None else self.tracing.fw_metadata
        if data is None:
            yield
            return
        before, data.bw_donated_idxs = data.bw_donated_idxs, []
        try:
            yield
        finally:
            data.bw_donated_idxs = before


def compile_in_place(module: nn.Module, **options: Any) -> None:
    """Compile a module as `module.compile()` does, torch's own modules too, which that ignores."""
    call: Any = module._call_impl

    def run(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    module._compiled_call_impl = torch.compile(run, **options)


def argument_of_gradient(output: Any) -> int | None:
    """Return the number of the argument whose gradient an output of a backward is; else None."""
    return argument_of(output.grad_of) if isinstance(output, _GradAOTOutput) else None


def argument_of(source: Any) -> int | None:
    """Return the number of the argument that an input of a graph is; None for anything else."""
    return source.idx if isinstance(source, _PlainAOTInput) else None


def outputs_with_sources(graph: fx.Graph) -> tuple[list[Any], list[Any]]:
    """Return the outputs of a backward graph, and what each is."""
    output = graph.output_node()
    outputs = list(output.args[0])  # type: ignore[arg-type]  # a tuple, in compiled graphs
    return outputs, output.meta.get("desc") or [None] * len(outputs)


def pin_layouts(graph: fx.Graph) -> None:
    """Let compiled code return all outputs with the strides that the graph says."""
    output = graph.output_node()
    (outputs,) = output.args
    output.meta["user_visible_output_idxs"] = list(range(len(outputs)))  # type: ignore[arg-type]
