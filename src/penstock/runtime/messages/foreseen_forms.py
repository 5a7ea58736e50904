"""Forms of messages that nobody sends: a dry run takes them from the examples of its stages."""

from collections.abc import Mapping

from penstock.errors import StageError
from penstock.ir import Message, StageId
from penstock.runtime.messages.forms import Form, TensorForm
from penstock.runtime.program import Program
from penstock.stage import PipelineStage
from penstock.stage.examples import Examples


def foresee_forms(
    program: Program, stages: Mapping[StageId, PipelineStage], *, has_backward: bool
) -> dict[Message, Form]:
    """Return the forms of all messages that arrive, given the examples of the stages."""
    return {
        message: _form_of(message, stages[message.taker], has_backward)
        for messages in program.arriving.values()
        for message in messages
    }


def _form_of(message: Message, stage: PipelineStage, has_backward: bool) -> Form:
    name = "output_args" if message.is_gradient else "input_args"
    examples: Examples = stage.output_args if message.is_gradient else stage.input_args
    if message.skip or stage.tied:
        raise StageError(
            f"stage {stage.stage_index}: a dry run on torch's fake backend knows only its own "
            "stages, and skips and tied parameters depend on others. Use real ranks."
        )
    if examples is None:
        raise StageError(
            f"stage {stage.stage_index} has no {name}, and no message arrives in a dry run on "
            f"torch's fake backend that would show its shapes. Give the stage {name}."
        )
    forms = [TensorForm.of(example.detach()) for example in examples]
    if message.is_gradient:
        forms = [form for form in forms if form.dtype.is_floating_point]
    needs_grad = has_backward and not message.is_gradient
    return Form.of_tree(
        tuple(
            TensorForm(
                form.shape, form.dtype, needs_grad and form.dtype.is_floating_point, form.spread
            )
            for form in forms
        )
    )
