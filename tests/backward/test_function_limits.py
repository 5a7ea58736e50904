"""Edges of the functions' contract: what counts as a loss, retries, groups written to in part."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from backward.case import Raw
from backward.mechanisms import MECHANISMS
from penstock.backward import (
    ParamGroup,
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)
from penstock.errors import BackwardError


def _halves(model: nn.Module) -> list[ParamGroup]:
    x = torch.randn(3, 4, requires_grad=True)
    return stage_backward_input(model(x), torch.ones(3, 4), [x], model.parameters())[1]


def test_scalar_with_a_gradient_of_none_is_a_loss() -> None:
    model, x = nn.Linear(4, 1), torch.randn(1, 4, requires_grad=True)
    (dx,) = stage_backward([model(x).sum()], [None], [x])
    torch.testing.assert_close(dx, model.weight.detach())
    assert model.weight.grad is not None


def test_outputs_that_nobody_used_add_nothing() -> None:
    model, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    assert (None,) == stage_backward((model(x), model(x)), (None, None), [x])
    grads, groups = stage_backward_input([model(x)], [None], [x], model.parameters())
    stage_backward_weight(model.parameters(), groups)
    assert (None,) == grads
    assert all(tensor.grad is None for tensor in (x, *model.parameters()))


def test_full_backward_neither_adds_to_an_earlier_gradient_of_an_input_nor_leaves_one() -> None:
    model, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    x.grad = torch.ones(3, 4)
    (dx,) = stage_backward(model(x).sum(), None, [x])
    torch.testing.assert_close(dx, model.weight.detach().sum(0).expand(3, 4))
    assert x.grad is None


def test_input_half_adds_to_an_earlier_gradient_of_an_input() -> None:
    """Once, though the input was given twice."""
    model, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    x.grad = torch.ones(3, 4)
    grads, _ = stage_backward_input([model(x).sum()], None, [x, x], model.parameters())
    expected = model.weight.detach().sum(0).expand(3, 4)
    torch.testing.assert_close(list(grads), [expected, expected])
    torch.testing.assert_close(x.grad, 1 + expected)


class Outputs:
    """A container that torch was taught about."""

    def __init__(self, *values: Tensor | None) -> None:
        self.values = values


def test_outputs_may_be_in_a_registered_container() -> None:
    pytree.register_pytree_node(
        Outputs, lambda outputs: (list(outputs.values), None), lambda values, _: Outputs(*values)
    )
    model, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    outputs, grads = Outputs(model(x), x * 2), Outputs(torch.ones(3, 4), None)
    (dx,) = stage_backward(outputs, grads, [x])
    torch.testing.assert_close(dx, model.weight.detach().sum(0).expand(3, 4))


def test_parameter_that_is_not_among_the_weights_gets_nothing() -> None:
    model, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    _, groups = stage_backward_input(model(x), torch.ones(3, 4), [x], [model.bias])
    (grad,) = stage_backward_weight([model.bias], groups)
    assert torch.equal(torch.full((4,), 3.0), grad)
    assert model.weight.grad is None


def test_weight_half_can_be_run_after_one_of_its_groups_was_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    groups = _halves(model)
    assert 2 == len(groups)
    for group in groups:
        arrived = group["grads"]
        group["grads"] = []
        with pytest.raises(BackwardError, match="has 0 entries; expected 1"):
            stage_backward_weight(model.parameters(), groups)
        group["grads"] = arrived
    stage_backward_weight(model.parameters(), groups)
    assert all(param.grad is not None for param in model.parameters())


def test_weight_half_that_failed_in_a_hook_cannot_add_twice() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def fail(_: Tensor) -> None:
        raise OSError("disk full")

    handle = model[1].bias.register_post_accumulate_grad_hook(fail)
    groups = _halves(model)
    with pytest.raises(OSError, match="disk full"):
        stage_backward_weight(model.parameters(), groups)
    handle.remove()
    with pytest.raises(BackwardError, match="has run already"):
        stage_backward_weight(model.parameters(), groups)


def test_one_entry_of_a_groups_gradients_can_be_overwritten() -> None:
    model = nn.Linear(4, 4)
    (group,) = _halves(model)
    replacement = torch.zeros(3, 4)
    replacement += 1  # A version of its own must not pass for a modification.
    replacement *= 2
    group["grads"][0] = (replacement,)
    stage_backward_weight(model.parameters(), [group])
    assert model.bias.grad is not None
    assert torch.equal(torch.full((4,), 6.0), model.bias.grad)


def test_entry_that_is_no_tuple_is_rejected() -> None:
    model = nn.Linear(4, 4)
    (group,) = _halves(model)
    group["grads"] = [torch.ones(3, 4)]
    with pytest.raises(BackwardError, match="is a Tensor; expected a tuple of tensors or None"):
        stage_backward_weight(model.parameters(), [group])


def test_group_is_a_mapping_with_two_keys() -> None:
    (group,) = _halves(nn.Linear(4, 4))
    assert ["params", "grads"] == list(group)
    assert "grads" in group
    assert group.get("intermediates") is None
    with pytest.raises(KeyError, match="'params' and 'grads' only"):
        group["intermediates"]
    with pytest.raises(KeyError, match="only 'grads' of a ParamGroup can be set"):
        group["params"] = []


def test_weight_that_is_computed_is_rejected() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    computed = layer.weight * 2
    with pytest.raises(BackwardError, match=r"weights holds a tensor .* computed from others"):
        stage_backward_input(x @ computed, torch.ones(3, 4), [x], [computed])


def test_complex_scale_of_an_added_parameter_is_conjugated() -> None:
    bias = nn.Parameter(torch.zeros(4, dtype=torch.complex64))
    x = torch.ones(3, 4, dtype=torch.complex64, requires_grad=True)
    fixed, grad = torch.ones(4, 4, dtype=torch.complex64), torch.ones(3, 4, dtype=torch.complex64)
    torch.addmm(bias, x, fixed, beta=1j).backward(grad)
    expected, bias.grad = bias.grad, None
    _, groups = stage_backward_input(torch.addmm(bias, x, fixed, beta=1j), grad, [x], [bias])
    stage_backward_weight([bias], groups)
    torch.testing.assert_close(bias.grad, expected)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        raise RuntimeError("cache miss: look-up failed a second time")


def test_users_error_is_not_taken_for_a_released_graph() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match="cache miss") as caught:
        stage_backward_input(Failing.apply(x), torch.ones(3, 4), [x], [])
    assert not isinstance(caught.value, BackwardError)


class TablesAndSparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 4, sparse=True)
        self.table = nn.Parameter(torch.randn(2, 3, 4))
        self.other = nn.Parameter(torch.randn(2, 3, 4))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        table = self.table + self.other + self.embedding(ids)
        return x @ table.mT @ table


def test_sparse_gradient_that_shares_memory_with_a_dense_one_stays_right() -> None:
    """Found by random networks: autograd gives a table the very memory that holds the values
    of the embedding's sparse gradient. Adding to the table first spoilt the embedding's."""
    model = TablesAndSparseEmbedding().double()
    params = list(model.parameters())
    ids = [torch.randint(0, 4, (2, 3)) for _ in range(2)]
    inputs = [torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    grads = [torch.randn(2, 3, 4, dtype=torch.float64) for _ in range(2)]
    expected = torch.zeros(4, 4, dtype=torch.float64)
    for x, i, grad in zip(inputs, ids, grads, strict=True):
        expected += torch.autograd.grad(model(x, i), model.embedding.weight, grad)[0].to_dense()

    outputs = [model(x, i) for x, i in zip(inputs, ids, strict=True)]
    _, groups = stage_backward_input(outputs[0], grads[0], inputs[:1], params)
    stage_backward(outputs[1], grads[1], inputs[1:])
    stage_backward_weight(params, groups)
    assert model.embedding.weight.grad is not None
    torch.testing.assert_close(model.embedding.weight.grad.to_dense(), expected)


class _Costly(torch.autograd.Function):
    """An identity that tells when its backward runs."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, log: list[str]) -> torch.Tensor:
        ctx.log = log
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.log.append("ran")
        return grad, None


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_backward_of_a_computed_parameter_that_is_added_waits_for_the_weight_half(
    mechanism: Any,
) -> None:
    """It ran in I, so a stage whose weights join its activation by adding had no W to put off."""
    log: list[str] = []
    stage = Raw(lambda self, x: x.sin() + _Costly.apply(self.w, log), w=torch.randn(4))
    run = mechanism(stage)
    for _ in range(2):
        _, weight_half = run((torch.randn(3, 4, requires_grad=True),), {}).backward_input(None)
        assert [] == log
        weight_half()
        assert ["ran"] == log
        log.clear()
