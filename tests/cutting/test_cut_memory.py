"""Memory that values share, and that operations change, where a cut comes between them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import penstock
from cut_nets import WIDTH, Net, check, make_batch
from penstock import pipe_split
from penstock.errors import PartitionError


def past_the_stage_that_changes_a_view(net: Net, x: Tensor) -> Tensor:
    y = net.layers[0](x)
    view = y.view(-1)
    pipe_split()
    view.add_(1)
    doubled = view * 2
    pipe_split()
    return doubled.view_as(y) + y


def past_the_stage_that_changes_the_base(net: Net, x: Tensor) -> Tensor:
    y = net.layers[0](x)
    view = y.view(-1)
    pipe_split()
    y.add_(1)
    doubled = net.layers[1](y)
    pipe_split()
    return doubled + view.view_as(y)


@pytest.mark.parametrize(
    "run", [past_the_stage_that_changes_a_view, past_the_stage_that_changes_the_base]
)
def test_value_that_passes_the_stage_that_changes_it_is_rejected(
    run: Callable[[Net, Tensor], Tensor],
) -> None:
    with pytest.raises(PartitionError, match=r"stage 1 changes memory in place that .* share"):
        penstock.cut(Net(run), (torch.ones(2, WIDTH),))


@pytest.mark.parametrize("is_made_before", [False, True])
def test_part_of_a_tensor_is_replaced_by_what_comes_from_before_the_cut(
    is_made_before: bool,
) -> None:
    def run(net: Net, x: Tensor) -> Tensor:
        z = net.layers[0](x)
        y = net.layers[1](x) if is_made_before else x
        pipe_split()
        y = net.layers[2](y)
        y[:, 0] = z[:, 1]
        return y

    check(Net(run), 2, [make_batch(), make_batch()])


class WithBuffer(Net):
    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__(run)
        self.register_buffer("count", torch.zeros(WIDTH, dtype=torch.float64))


def writes_to_out(count: Tensor) -> None:
    torch.add(count, 1, out=count)


def writes_to_a_list(count: Tensor) -> None:
    torch._foreach_add_([count], 1.0)


@pytest.mark.parametrize("write", [writes_to_out, writes_to_a_list])
def test_buffer_written_in_one_stage_and_used_in_another_is_rejected(
    write: Callable[[Tensor], None],
) -> None:
    def run(net: WithBuffer, x: Tensor) -> Tensor:
        write(net.count)
        h = net.layers[0](x) + net.count
        pipe_split()
        return net.layers[1](h) + net.count

    with pytest.raises(PartitionError, match="'count' is changed in the forward"):
        penstock.cut(WithBuffer(run), (torch.ones(2, WIDTH, dtype=torch.float64),))
