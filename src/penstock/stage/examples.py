"""Examples of the tensors of one microbatch, and the check that other tensors match them."""

from collections.abc import Sequence
from typing import Any, TypeAlias

from torch import Tensor

from penstock.backward.structure import describe, tensors_in
from penstock.errors import PipeliningShapeError, StageError
from penstock.stage.dtensors import Spread

Examples: TypeAlias = Tensor | Sequence[Tensor] | None


def as_examples(name: str, args: Examples, grads: Any) -> tuple[Tensor, ...] | None:
    """Return the examples as a tuple, checked against the examples of their gradients."""
    if args is None:
        return None
    examples = tuple(args) if isinstance(args, Sequence) else (args,)
    for example in examples:
        if not isinstance(example, Tensor):
            raise StageError(
                f"{name} holds a {type(example).__name__}. "
                "Expected tensors like those of one microbatch; they may be on the meta device."
            )
    found = tuple(grads) if isinstance(grads, Sequence) else (grads,)
    for number, (example, grad) in enumerate(zip(examples, found, strict=False)):
        if grad is None:
            continue
        if not isinstance(grad, Tensor) or (grad.shape, grad.dtype) != (
            example.shape,
            example.dtype,
        ):
            got = describe(grad) if isinstance(grad, Tensor) else f"a {type(grad).__name__}"
            raise StageError(
                f"{name}[{number}] is {describe(example)}, but its gradient is {got}. "
                "A gradient has the shape and dtype of its tensor."
            )
    return examples


def check_like(examples: tuple[Tensor, ...], values: Any, place: str) -> None:
    found = tensors_in(values)
    if len(found) != len(examples):
        raise PipeliningShapeError(
            f"{place}: number mismatch: expected {len(examples)} tensors, got {len(found)}. "
            "Give the stage examples of all its tensors, or none."
        )
    for number, (example, tensor) in enumerate(zip(examples, found, strict=True)):
        remedy = "Give the stage examples like its tensors, or none."
        check_spread(f"{place} {number}", Spread.of(example), Spread.of(tensor), remedy)
        check_tensor(f"{place} {number}", example, tensor, remedy)


def check_spread(place: str, expected: Spread | None, found: Spread | None, remedy: str) -> None:
    """Raise an error at `place` if a tensor is not a DTensor like the expected one, or plain."""
    check_alike(place, expected, found, remedy)
    if expected is not None and found is not None and expected.shape != found.shape:
        raise PipeliningShapeError(
            f"{place}: shape mismatch: expected {expected}, got {found}. {remedy}"
        )


def check_alike(place: str, expected: Spread | None, found: Spread | None, remedy: str) -> None:
    """Raise an error at `place` if two tensors of any shape are not spread over a mesh alike."""
    if expected is None or found is None:
        if expected is not found:
            raise PipeliningShapeError(
                f"{place}: kind mismatch: expected {expected or 'a plain tensor'}, "
                f"got {found or 'a plain tensor'}. {remedy}"
            )
    elif expected.in_words != found.in_words:
        raise PipeliningShapeError(
            f"{place}: placement mismatch: expected {expected.in_words}, got {found.in_words}. "
            f"{remedy}"
        )


def check_tensor(place: str, expected: Any, tensor: Tensor, remedy: str) -> None:
    """Raise an error at `place` if a tensor does not have the expected shape and dtype."""
    if tensor.shape != expected.shape:
        raise PipeliningShapeError(
            f"{place}: shape mismatch: expected {tuple(expected.shape)}, "
            f"got {tuple(tensor.shape)}. {remedy}"
        )
    if tensor.dtype != expected.dtype:
        raise PipeliningShapeError(
            f"{place}: dtype mismatch: expected {expected.dtype}, got {tensor.dtype}. {remedy}"
        )
