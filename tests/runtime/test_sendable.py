"""Every tensor that a stage sends arrives as it is, or is refused by name before it is sent."""

from typing import Any

import pytest
import torch
from failing_steps import errors_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from fuzzing import rotated
from odd_tensors import REFUSED, SENT, Receiver, Sender, Tagged, memory_of, numbers, total
from penstock import LocalGroup, Pipeline, PipelineStage, local_ranks
from penstock.comm.collective_results import values_of, waited
from penstock.errors import CommError, StageError
from penstock.runtime.messages.sendable import as_sent, find_fault, is_memory_alone

pytestmark = pytest.mark.filterwarnings("ignore")  # Torch warns of half of these kinds.

CPU = torch.device("cpu")
NUM_STEPS, NUM_MICROBATCHES = 3, 2
IN_STEP_1, IN_STEP_3 = 1, 2 * NUM_MICROBATCHES + 1


def _run(group: LocalGroup, module: nn.Module, schedule: str = "1F1B", **kwargs: Any) -> None:
    stage = PipelineStage(module, group.rank, 2, CPU, group=group, **kwargs)
    pipeline = Pipeline(
        stage,
        schedule,
        num_microbatches=NUM_MICROBATCHES,
        loss_fn=lambda output, _: output,
        scale_grads=False,
    )
    for _ in range(NUM_STEPS):
        pipeline.step_microbatches([(numbers(),)] * NUM_MICROBATCHES if group.rank == 0 else None)


@rotated(name=list(SENT), schedule=["1F1B", "ZB-H1"])
def test_an_odd_tensor_and_its_gradient_arrive(name: str, schedule: str) -> None:
    sender, receiver = Sender(SENT[name]), Receiver()
    local_ranks(2, lambda group: _run(group, [sender, receiver][group.rank], schedule))
    alone = Sender(SENT[name])
    y, expected = alone(numbers())
    for found in receiver.came:
        assert type(found) is Tensor
        assert (expected.shape, expected.dtype) == (found.shape, found.dtype)
        assert expected.requires_grad == found.requires_grad
        assert torch.equal(memory_of(expected), memory_of(found))
    assert NUM_STEPS * NUM_MICROBATCHES == len(receiver.came)
    (y.sum() + total(expected)).backward()
    expected_grad = NUM_STEPS * NUM_MICROBATCHES * alone.scale.grad
    torch.testing.assert_close(expected_grad, sender.scale.grad, rtol=1e-6, atol=1e-6)


@rotated(
    name=list(REFUSED),
    begin={"step 1": IN_STEP_1, "step 3": IN_STEP_3},
    is_dynamic={"static": False, "dynamic": True},
)
def test_a_tensor_that_cannot_be_sent_is_refused_by_name(
    name: str, begin: int, is_dynamic: bool
) -> None:
    make, what = REFUSED[name]
    receiver = Receiver()
    modules = [Sender(make, begin), receiver]
    first, second = errors_of(
        2, lambda group: _run(group, modules[group.rank], dynamic_shapes=is_dynamic)
    )
    assert isinstance(first, StageError)
    assert str(first).startswith(f"stage 0, microbatch 0: output 1 is {what}")
    middle = "cannot be sent to another rank. Expected a plain, dense tensor with values on cpu: "
    assert middle in str(first)
    assert isinstance(second, CommError)
    assert begin - 1 == len(receiver.came)


@pytest.mark.parametrize("name", [*SENT, *REFUSED])
def test_a_tensor_that_is_sent_without_a_closer_look_is_what_its_memory_holds(name: str) -> None:
    make = SENT[name] if name in SENT else REFUSED[name][0]
    tensor = make(numbers().requires_grad_())
    if type(tensor) is not Tensor or tensor.is_quantized:
        return  # These have another class or another dtype, and are always looked at closely.
    is_alone = is_memory_alone(tensor, CPU, is_complex=tensor.is_complex())
    assert not (is_alone and name in REFUSED)
    assert is_alone or name != "plain"
    if is_alone:
        assert tensor.data_ptr() == as_sent(tensor, CPU, "here").data_ptr()


def test_a_negative_view_of_whole_memory_is_looked_at_closely() -> None:
    tensor = torch._neg_view(numbers())  # Only torch itself makes one that begins its memory.
    assert not is_memory_alone(tensor, CPU, is_complex=False)
    assert torch.equal(-numbers(), as_sent(tensor, CPU, "here"))


class _GradientOf(nn.Module):
    """A loss whose gradient with respect to its input is `grad(call)`."""

    def __init__(self, grad: Any) -> None:
        super().__init__()
        self.grad, self.call = grad, 0

    def forward(self, x: Tensor) -> Tensor:
        module = self

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x.sum()

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                module.call += 1
                made: Tensor = module.grad(module.call)
                return made

        return Function.apply(x)  # type: ignore[no-any-return]  # Torch does not say what it is.


@pytest.mark.parametrize("begin", [IN_STEP_1, IN_STEP_3], ids=["step 1", "step 3"])
def test_a_gradient_that_cannot_be_sent_is_refused_by_name(begin: int) -> None:
    def grad(call: int) -> Tensor:
        ones = torch.ones(3, 4, dtype=torch.float64)
        return ones if call < begin else ones.to_sparse()

    modules = [nn.Linear(4, 4, dtype=torch.float64), _GradientOf(grad)]
    _, error = errors_of(2, lambda group: _run(group, modules[group.rank]))
    expected = "stage 1, microbatch 0: input gradient 0 is of layout torch.sparse_coo on cpu, which"
    assert isinstance(error, StageError)
    assert str(error).startswith(expected)


@pytest.mark.parametrize("num_ranks", [1, 2], ids=["one rank", "two ranks"])
def test_a_collective_is_waited_for_wherever_its_result_goes(num_ranks: int) -> None:
    """An AsyncCollectiveTensor has no memory: reading it crashed the process."""

    class Collective(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
            self.came: list[type] = []

        def forward(self, x: Tensor) -> Tensor:
            self.came.append(type(x))
            return _AsCollective.apply(self.scale * x)  # type: ignore[no-any-return]  # As above.

    modules = [Collective(), Collective()]
    kept: dict[str, Any] = {}

    def main(group: LocalGroup) -> None:
        stages = [
            PipelineStage(modules[stage], stage, 2, CPU, group=group)
            for stage in range(2)
            if stage % num_ranks == group.rank
        ]
        schedule = "1F1B" if num_ranks == 2 else "Interleaved1F1B"
        loss_fn = lambda output, _: _AsCollective.apply(output.sum())  # noqa: E731
        pipeline = Pipeline(stages, schedule, num_microbatches=2, loss_fn=loss_fn)
        x = numbers().requires_grad_()
        losses: list[Any] = []
        outputs = pipeline.step_microbatches([(x,)] * 2 if group.rank == 0 else None, losses=losses)
        if losses:
            kept["step"] = [*losses, *outputs]
        losses = []
        outputs = pipeline.eval(numbers()[:2], losses=losses)
        if losses:
            kept["eval"] = [*losses, outputs]
        if group.rank == 0:
            assert type(x.grad) is Tensor

    local_ranks(num_ranks, main)
    assert {"step", "eval"} == set(kept)
    for values in kept.values():
        assert [Tensor] * len(values) == [type(value) for value in values]
    assert {Tensor} == set(modules[1].came)
    for module in modules:
        torch.testing.assert_close(numbers().sum(), module.scale.grad)


class _AsCollective(torch.autograd.Function):
    """The identity, whose result and gradient are still on their way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return AsyncCollectiveTensor(x.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return AsyncCollectiveTensor(waited(grad).clone())


def test_waiting_leaves_all_other_values_as_they_are() -> None:
    x = torch.ones(2, requires_grad=True)
    for value in (x, nn.Parameter(x.detach()), None, 3.0, "text"):
        assert value is waited(value)
    assert Tensor is type(values_of(AsyncCollectiveTensor(x.detach())))


def test_a_tensor_on_another_device_is_refused() -> None:
    with pytest.raises(StageError) as caught:
        as_sent(torch.ones(2), torch.device("cuda", 1), "stage 0, microbatch 2: output", 3)
    expected = (
        "stage 0, microbatch 2: output 3 is on cpu, which cannot be sent to another rank. Expected "
        "a plain, dense tensor with values on cuda:1: return its to('cuda:1')."
    )
    assert expected == str(caught.value)


def test_a_device_without_an_index_takes_tensors_of_its_kind() -> None:
    assert find_fault(torch.ones(2), torch.device("cpu")) is None
    assert find_fault(torch.ones(2), torch.device("cpu", 0)) is None


def test_a_step_inside_a_mode_that_makes_other_tensors_is_refused() -> None:
    def main(group: LocalGroup) -> None:
        with FakeTensorMode(allow_non_fake_inputs=True):
            _run(group, nn.Linear(4, 4))

    message = (
        "a step was started where torch makes every new tensor a FakeTensor, so nothing can be "
        "received. Expected plain tensors: leave the mode, such as FakeTensorMode, before the step."
    )
    with pytest.raises(StageError) as caught:
        local_ranks(2, main)
    assert message == str(caught.value)


def _tied_grads(change: Any) -> list[Tensor]:
    """The gradients of both copies, with the first one's changed before they are exchanged."""

    def main(group: LocalGroup) -> Tensor:
        layer = nn.Linear(4, 4, bias=False, dtype=torch.float64)
        nn.init.eye_(layer.weight)

        def hook(param: Tensor) -> None:
            param.grad = change(param.grad)

        if group.rank == 0:
            layer.weight.register_post_accumulate_grad_hook(hook)
        stage = PipelineStage(layer, group.rank, 2, CPU, group=group, tied={"weight": "words"})
        loss_fn = lambda output, _: output.sum()  # noqa: E731
        pipeline = Pipeline(stage, "1F1B", num_microbatches=1, loss_fn=loss_fn)
        pipeline.step(numbers())
        assert layer.weight.grad is not None
        return layer.weight.grad

    return local_ranks(2, main)


def test_the_gradient_of_a_tied_parameter_may_be_a_collectives_result() -> None:
    plain = _tied_grads(lambda grad: grad)
    found = _tied_grads(lambda grad: AsyncCollectiveTensor(grad.detach()))
    for expected, grad in zip(plain, found, strict=True):
        assert type(grad) is Tensor
        assert torch.equal(expected, grad)


def test_the_gradient_of_a_tied_parameter_that_cannot_be_sent_is_refused() -> None:
    expected = (
        "the gradient of tied parameter 'words' is of class odd_tensors.Tagged, a subclass of "
        "Tensor, which cannot be sent to another rank. Expected a plain, dense tensor with values "
        "on cpu: return plain tensors"
    )
    with pytest.raises(StageError) as caught:
        _tied_grads(lambda grad: grad.detach().as_subclass(Tagged))
    assert str(caught.value).startswith(expected)
