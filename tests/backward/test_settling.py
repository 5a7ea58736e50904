"""Terms of one parameter that come in any order and layout add up."""

import itertools

import pytest
import torch
from torch import nn

from penstock.backward.settling import settle
from penstock.backward.terms import MatrixProduct

ORDERS = list(itertools.permutations(("sparse", "dense", "product")))


@pytest.mark.parametrize("signals", [False, True])
@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_sparse_and_dense_terms_of_one_parameter_add_up(
    order: tuple[str, ...], signals: bool
) -> None:
    param = nn.Parameter(torch.zeros(3, 3))
    left, right, dense = torch.randn(3, 2), torch.randn(2, 3), torch.randn(3, 3)
    sparse = torch.eye(3).to_sparse()
    terms = {"sparse": sparse, "dense": dense, "product": MatrixProduct(left, right)}
    for _ in range(2):  # The second time there is a gradient already.
        settle([(param, terms[kind]) for kind in order], signal_accumulators=signals)
    assert param.grad is not None
    torch.testing.assert_close(param.grad.to_dense(), 2 * (torch.eye(3) + dense + left @ right))
