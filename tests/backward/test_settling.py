"""Terms of one parameter that come in any order and layout add up."""

import itertools

import pytest
import torch
from torch import Tensor, nn

from penstock.backward.settling import Terms, settle
from penstock.backward.terms import MatrixProduct, Unmodified
from penstock.errors import BackwardError

ORDERS = list(itertools.permutations(("sparse", "dense", "product")))


@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_sparse_and_dense_terms_of_one_parameter_add_up(order: tuple[str, ...]) -> None:
    left, right, dense = torch.randn(3, 2), torch.randn(2, 3), torch.randn(3, 3)
    sparse = torch.eye(3).to_sparse()
    terms = {"sparse": sparse, "dense": dense, "product": MatrixProduct(left, right)}
    for signals in (False, True):
        param = nn.Parameter(torch.zeros(3, 3))
        for _ in range(2):  # The second time there is a gradient already.
            settle([(param, terms[kind]) for kind in order], signal_accumulators=signals)
        assert param.grad is not None
        torch.testing.assert_close(param.grad.to_dense(), 2 * (torch.eye(3) + dense + left @ right))


def test_first_gradient_is_laid_out_as_autograd_does_it() -> None:
    """By the strides of the parameter, whatever those of the product are."""
    param = nn.Parameter(torch.zeros(2, 3).t())
    left, right = torch.randn(3, 4), torch.randn(4, 2)
    settle([(param, MatrixProduct(left, right))], signal_accumulators=False)
    assert param.grad is not None
    assert param.stride() == param.grad.stride()
    assert torch.equal(left @ right, param.grad)


def test_gradient_has_the_type_that_the_parameter_asks_for() -> None:
    param = nn.Parameter(torch.zeros(3, 2))
    param.grad_dtype = torch.float64
    left, right = torch.randn(3, 4).double(), torch.randn(4, 2).double()
    for _ in range(2):
        settle([(param, MatrixProduct(left, right))], signal_accumulators=False)
    assert param.grad is not None
    assert param.grad.dtype is torch.float64
    assert torch.equal(2 * (left @ right), param.grad)


def test_terms_of_a_shared_parameter_are_added_in_the_type_it_asks_for() -> None:
    param = nn.Parameter(torch.zeros(3, 2))
    param.grad_dtype = torch.float64
    first, second = torch.randn(2, 3, 2)
    settle([(param, first), (param, second)], signal_accumulators=False)
    assert param.grad is not None
    assert torch.equal(first.double() + second.double(), param.grad)


def test_hook_that_changes_what_another_term_needs_is_refused() -> None:
    """Such as that of an optimizer, which steps a weight that another gradient is computed with."""
    stepped, other = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.zeros(2, 2))
    factor = stepped.detach()

    def step(param: Tensor) -> None:
        param.detach().mul_(2)

    stepped.register_post_accumulate_grad_hook(step)
    unmodified = Unmodified([factor])
    terms: Terms = [(stepped, torch.ones(2, 2)), (other, MatrixProduct(factor, factor))]
    with pytest.raises(BackwardError, match="modified in place after the input backward"):
        settle(terms, signal_accumulators=False, recheck=unmodified.check)
    assert other.grad is None
