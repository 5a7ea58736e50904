"""The example of a batch, by which a model is cut."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from penstock.errors import MicrobatchError, StageError
from penstock.microbatches import split_args_kwargs_into_chunks
from penstock.microbatches.splitting import batch_size, split_target
from penstock.torch_private import pytree

Example: TypeAlias = Tensor | Sequence[Any] | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Microbatch:
    """The arguments of the model for one microbatch, and its target if one was given."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any


@dataclass(frozen=True, slots=True)
class ExampleBatch:
    """A whole batch, as a step will be given."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any

    @classmethod
    def of(cls, example: Example, kwargs: Mapping[str, Any] | None, target: Any) -> "ExampleBatch":
        """Read what `parallelize` was given: a tensor, arguments, or keyword arguments."""
        if isinstance(example, Mapping):
            if kwargs is not None:
                raise StageError(
                    "example is a dict of keyword arguments, and example_kwargs was given too. "
                    "Give the arguments as a tuple, and the keyword arguments as example_kwargs."
                )
            return cls((), dict(example), target)
        args = tuple(example) if isinstance(example, list | tuple) else (example,)
        return cls(args, dict(kwargs or {}), target)

    def size(self, args_chunk_spec: Any, kwargs_chunk_spec: Any) -> int:
        """Return the number of samples, along the dim in which the batch is cut."""
        found = batch_size(self.args, self.kwargs, args_chunk_spec, kwargs_chunk_spec)
        if found is None:
            raise MicrobatchError(
                "example has no tensor that could be cut into microbatches. Expected a batch, as "
                "step() will be given: parallelize(model, example=(tokens,), …)."
            )
        return found

    def first_microbatch(
        self, num_microbatches: int, args_chunk_spec: Any, kwargs_chunk_spec: Any
    ) -> Microbatch:
        """Return the first microbatch; raise an error if others would have other shapes."""
        args, kwargs = split_args_kwargs_into_chunks(
            self.args,
            self.kwargs,
            num_microbatches,
            args_chunk_spec if self.args else None,
            kwargs_chunk_spec if self.kwargs else None,
        )
        if _shapes(args[0], kwargs[0]) != _shapes(args[-1], kwargs[-1]):
            raise MicrobatchError(
                f"example is a batch of {self.size(args_chunk_spec, kwargs_chunk_spec)}, which "
                f"cannot be cut into {num_microbatches} equal microbatches. Expected a whole "
                "batch, as step() will be given, of a multiple of num_microbatches."
            )
        target = None if self.target is None else split_target(self.target, num_microbatches)[0]
        return Microbatch(args[0], kwargs[0], target)


def _shapes(*values: Any) -> list[Any]:
    return [leaf.shape for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
