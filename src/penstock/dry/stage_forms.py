"""The forms of all messages between the stages of a cut model, found by one forward of each."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from penstock.cutting import CutModel
from penstock.cutting.cut_model import CutInfo
from penstock.cutting.shape_counts import counting_saved
from penstock.dry.valueless import valueless_tree, without_values
from penstock.ir import Message, Skip, StageId
from penstock.runtime.messages.forms import Form, TensorForm, flatten
from penstock.stage.outputs import as_arguments, shares_of
from penstock.stage.passage import needs_grad, stand_in_for
from penstock.torch_private import pytree


@dataclass(frozen=True, slots=True)
class StageForms:
    """The messages between stages, and what stages hold."""

    by_ends: Mapping[tuple[StageId, StageId], Form]
    """The form of the messages from one stage to another, activations and gradients."""
    held_bytes: tuple[int, ...]
    """The bytes that a forward of each stage keeps for its backward."""
    parameter_bytes: tuple[int, ...]
    outputs_need_grad: bool
    """Whether any output of the model does: if not, only a loss_fn could train something."""
    info: CutInfo

    @property
    def skips(self) -> frozenset[Skip]:
        """The pairs of stages, not neighbours, between which values travel."""
        stages = enumerate(self.info.stages)
        return frozenset(Skip(index, to) for index, own in stages for to in own.skips_out)

    def of(self, message: Message) -> Form:
        return self.by_ends[message.maker, message.taker]

    def tensor_bytes(self, message: Message) -> list[int]:
        """Return the bytes of each tensor of a message."""
        return [form.shape.numel() * form.dtype.itemsize for form in self.of(message).tensors]


def find_forms(pieces: CutModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StageForms:
    """Run each stage forward once on one microbatch, inside FakeTensorMode."""
    info = pieces.info()
    found: dict[tuple[StageId, StageId], Form] = {}
    held: list[int] = []
    kwargs = valueless_tree(kwargs)

    def run(stage: StageId, module: nn.Module, values: tuple[Any, ...]) -> Any:
        with without_values([module]), counting_saved() as saved:
            for tensor in (*module.parameters(), *module.buffers()):
                saved.leave_out(tensor)
            # Each stage has a graph of its own.
            arguments = pytree.tree_map_only(Tensor, stand_in_for, values)
            outputs = module(*arguments, **kwargs)
        held.append(saved.num_bytes)
        skips_out = info.stages[stage].skips_out
        if stage + 1 < info.num_stages:
            shares = shares_of(as_arguments(outputs), skips_out)
            for taker, share in zip((stage + 1, *skips_out), shares, strict=True):
                form = Form.of(*flatten(share))
                found[stage, taker] = form
                found[taker, stage] = _gradient_of(form)
        return outputs

    outputs = pieces.run_stages(run, valueless_tree(args))
    needs = any(map(needs_grad, pytree.tree_leaves(outputs)))
    sizes = (sum(p.nbytes for p in module.parameters()) for module in pieces.modules)
    return StageForms(found, tuple(held), tuple(sizes), needs, info)


def _gradient_of(form: Form) -> Form:
    """Return the form of the message that answers an activation."""
    needing = (tensor for tensor in form.tensors if tensor.requires_grad)
    return Form.of_tree(tuple(TensorForm(like.shape, like.dtype, False) for like in needing))
