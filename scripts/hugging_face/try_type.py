"""Train one model type whole and cut, and compare their gradients."""

import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from tiny_models import TinyModel, build
from torch import Tensor

import penstock
from penstock.cutting import CutModel, cut_any

NUM_STAGES, NUM_MICROBATCHES, LARGEST_DIFFERENCE = 2, 2, 1e-10


def try_type(category: str, kind: str, class_name: str, schedule: str) -> dict[str, Any]:
    """Return what became of a type: {"result": "equal"} and how it was cut, or why not.

    Some models compute a part in float32 whatever their parameters are. Where that does not train,
    or is equal only to that precision, the part is computed in float64 too.
    """
    found = _try(category, kind, class_name, schedule)
    if found["result"] == "unequal" or "float" in found.get("reason", "").lower():
        with float64_throughout():
            again = _try(category, kind, class_name, schedule)
        if again["result"] not in ("untrained", "unequal"):
            return again | {"float64_throughout": True}
    return found


def _try(category: str, kind: str, class_name: str, schedule: str) -> dict[str, Any]:
    found: dict[str, Any] = {"class": class_name}
    try:
        tiny = build(category, kind, class_name)
        expected = train_whole(tiny)
        again = train_whole(tiny)
    except Exception as exc:
        return found | {"result": "untrained", "reason": _brief(exc)}
    if any(_differ(expected[name], again[name]) > LARGEST_DIFFERENCE for name in expected):
        return found | {"result": "untrained", "reason": "two runs of the whole model differ"}
    if schedule == "none":
        return found | {"result": "trained"}
    example = {name: values[0] for name, values in _microbatches(tiny.batch).items()}
    try:
        with _noting_log() as records:
            pieces = cut_any(deepcopy(tiny.model), NUM_STAGES, (), example)
    except Exception as exc:
        return found | {"result": "uncut", "reason": _brief(exc)}
    found["way"] = "untraced" if pieces.repeats_inputs else "traced"
    if pieces.repeats_inputs:
        found["untraced_because"] = _brief_log(records[-1])
    found["starts"] = pieces.cut
    try:
        actual = train_stages(pieces, tiny.batch, schedule)
    except Exception as exc:
        return found | {"result": "failed", "reason": _brief(exc)}
    return found | judge(expected, actual)


@contextmanager
def _noting_log() -> Iterator[list[str]]:
    """Note what Penstock logs."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("penstock")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield records
    finally:
        logger.removeHandler(handler)


class _Float64Torch:
    """The module torch, with float64 for float32."""

    def __getattr__(self, name: str) -> Any:
        return torch.float64 if name in ("float32", "float") else getattr(torch, name)


@contextmanager
def float64_throughout() -> Iterator[None]:
    """Let models of transformers compute in float64 where they ask for float32."""
    changed = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("transformers.") and vars(module).get("torch") is torch
    ]
    as_float = Tensor.float
    Tensor.float = Tensor.double  # type: ignore[method-assign]  # put back below
    for module in changed:
        module.torch = _Float64Torch()  # type: ignore[attr-defined]  # put back below
    try:
        yield
    finally:
        Tensor.float = as_float  # type: ignore[method-assign]  # as it was
        for module in changed:
            module.torch = torch  # type: ignore[attr-defined]  # as it was


def _microbatches(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the values of each input for all microbatches."""
    return {
        name: value.chunk(NUM_MICROBATCHES)
        if isinstance(value, Tensor)
        else [value] * NUM_MICROBATCHES
        for name, value in batch.items()
    }


def train_whole(tiny: TinyModel) -> dict[str, Tensor | None]:
    """Return the gradients of the whole model, from one microbatch after the other."""
    model = deepcopy(tiny.model)
    parts = _microbatches(tiny.batch)
    for mb in range(NUM_MICROBATCHES):
        output = model(**{name: values[mb] for name, values in parts.items()})
        (loss_of(output) / NUM_MICROBATCHES).backward()
    names = model.named_parameters()
    gradients = {name: parameter.grad for name, parameter in names}
    if not any(grad is not None and bool(grad.any()) for grad in gradients.values()):
        raise ValueError("no parameter has a gradient")
    if not all(grad is None or bool(grad.isfinite().all()) for grad in gradients.values()):
        raise ValueError("a gradient is not finite")
    return gradients


def loss_of(output: Any, _: Any = None) -> Tensor:
    """Return the model's own loss, or one of its first tensor that has a gradient."""
    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    for value in output.values():
        if isinstance(value, Tensor) and value.requires_grad:
            weights = torch.linspace(-1, 1, value.numel(), dtype=value.dtype).view_as(value)
            return (value * weights).sum()
    raise ValueError("no output has a gradient")


def train_stages(pieces: CutModel, batch: dict[str, Any], schedule: str) -> dict[str, Any]:
    """Return the gradients of the stages after one step of a pipeline on ranks of one process."""

    def run_rank(group: penstock.LocalGroup) -> dict[str, Tensor | None]:
        stage = pieces.build_stage(group.rank, "cpu", group)
        pipeline = penstock.Pipeline(
            stage, schedule, num_microbatches=NUM_MICROBATCHES, loss_fn=loss_of
        )
        is_given = group.rank == 0 or pieces.repeats_inputs
        pipeline.step(**(batch if is_given else {}))
        return {name: p.grad for name, p in stage.submod.named_parameters()}

    gradients: dict[str, Any] = {}
    for own in penstock.local_ranks(NUM_STAGES, run_rank):
        for name, gradient in own.items():  # Tied ones are equal: a step sums them.
            if gradients.get(name) is None:
                gradients[name] = gradient
    return gradients


def judge(expected: dict[str, Tensor | None], actual: dict[str, Any]) -> dict[str, Any]:
    missing = [name for name in expected if name not in actual]
    if missing:
        return {"result": "unequal", "reason": f"no stage has {missing[0]}"}
    differences = {name: _differ(expected[name], actual[name]) for name in expected}
    worst = max(differences, key=lambda name: differences[name])
    result = "equal" if differences[worst] <= LARGEST_DIFFERENCE else "unequal"
    reason = {} if result == "equal" else {"reason": f"gradient of {worst}"}
    return {"result": result, "difference": differences[worst], **reason}


def _differ(expected: Tensor | None, actual: Tensor | None) -> float:
    """Return the largest difference, relative to the largest value if that is above one."""
    if expected is None and actual is None:
        return 0.0
    expected = torch.zeros_like(actual) if expected is None else expected
    actual = torch.zeros_like(expected) if actual is None else actual
    scale = max(1.0, float(expected.abs().max()))
    return float((expected - actual).abs().max()) / scale


def _brief_log(message: str) -> str:
    """Return why a model was not traced, from what the log says."""
    reason = re.search(r"not by tracing it: (.*)", message)
    return "" if reason is None else " ".join(reason.group(1).split())[:300]


def _brief(exc: Exception) -> str:
    """Return an error in one line, without the folders of this machine."""
    text = f"{type(exc).__name__}: {exc}"
    return " ".join(re.sub(r"\S*site-packages/", "", text).split())[:600]
