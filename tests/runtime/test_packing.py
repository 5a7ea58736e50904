"""Messages of several tensors: what travels, in how many pieces, and that all of it arrives."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import LocalGroup, Pipeline, PipelineStage
from penstock.comm import AbstractComm, Transfer
from penstock.comm.abstract_comm import BEGINNING
from penstock.ir.message import Channel
from penstock.runtime.messages.forms import Form, flatten
from penstock.runtime.messages.letters import LETTER_BYTES, as_letters, open_letter
from penstock.runtime.messages.packing import SMALL_BYTES, Packing
from stage_training import CPU

DTYPES = [torch.bool, torch.bfloat16, torch.complex128, torch.uint8, torch.float32, torch.int64]
LARGE = SMALL_BYTES // 4 + 1
"""More float32 values than a packed tensor has."""


def packing_of(tensors: list[Tensor]) -> Packing | None:
    return Packing.of([(tensor.shape, tensor.dtype) for tensor in tensors])


def through_memory(packing: Packing, tensors: list[Tensor]) -> list[Tensor]:
    """Pack, copy and unpack, as two ranks do: the tensors are there before their values."""
    received = packing.empties(CPU)
    unpacked = packing.unpack(received)
    for there, here in zip(received, packing.pack(tensors), strict=True):
        there.copy_(here)
    return unpacked


def test_tensors_of_many_dtypes_arrive_as_they_were() -> None:
    sizes = [(3,), (2, 5), (), (0, 4), (7, 1), (1,)]
    tensors = [(torch.randn(size) * 9).to(dtype) for size, dtype in zip(sizes, DTYPES, strict=True)]
    packing = packing_of(tensors)
    assert packing is not None
    for expected, found in zip(tensors, through_memory(packing, tensors), strict=True):
        assert expected.dtype == found.dtype
        assert torch.equal(expected, found)
        assert found.is_contiguous()
        assert 0 == found.data_ptr() % 64  # As torch's own: others may give other products.


def test_large_tensors_travel_by_themselves_and_are_not_copied() -> None:
    tensors = [torch.randn(2), torch.randn(LARGE), torch.randn(3), torch.randn(LARGE)]
    packing = packing_of(tensors)
    assert packing is not None
    pieces = packing.pack(tensors)
    assert [64 + 12, 4 * LARGE, 4 * LARGE] == [piece.nbytes for piece in pieces]
    assert pieces[1] is tensors[1]
    assert pieces[2] is tensors[3]
    assert all(map(torch.equal, tensors, through_memory(packing, tensors)))


@pytest.mark.parametrize("sizes", [[], [4], [LARGE, LARGE], [LARGE, 4]])
def test_message_in_which_packing_saves_no_transfer_is_not_packed(sizes: list[int]) -> None:
    tensors = [torch.empty(size) for size in sizes]
    assert packing_of(tensors) is None
    assert Form.of(*flatten(tuple(tensors))).packing is None


def test_change_of_one_packed_tensor_does_not_count_as_a_change_of_another() -> None:
    """Autograd would refuse the backward of a stage that changes one of its arguments in place."""
    packing = packing_of([torch.empty(2), torch.empty(2)])
    assert packing is not None
    x, flag = packing.unpack(packing.empties(CPU))
    x.zero_().requires_grad_()
    y = x * x
    flag.fill_(1)
    y.sum().backward()
    assert torch.equal(torch.zeros(2), x.grad)


@pytest.mark.parametrize("length", [0, 1, LETTER_BYTES - 8, LETTER_BYTES - 7, 5 * LETTER_BYTES])
def test_content_of_any_length_comes_out_of_its_letters(length: int) -> None:
    content = bytes(number % 251 for number in range(length))
    letter, *rest = as_letters(content)
    assert LETTER_BYTES == len(letter)
    begun, num_left = open_letter(bytes(letter))
    assert content == begun + b"".join(map(bytes, rest))
    assert num_left == sum(map(len, rest))
    assert (length > LETTER_BYTES - 8) == bool(rest)


class PackingComm(AbstractComm):
    """Counts what goes through another one, which it says packs, and notes who is waited for."""

    def __init__(self, comm: AbstractComm, *, packs: bool) -> None:
        self.rank, self.num_ranks, self.place = comm.rank, comm.num_ranks, comm.place
        self._comm, self._packs = comm, packs
        self.sizes: list[int] = []
        self.num_waits = 0

    def gather(self, value: Any, what: str = BEGINNING) -> list[Any]:
        return self._comm.gather(value, what)

    def open(self, channels: Iterable[Channel]) -> None:
        self._comm.open(channels)

    def copies(self, receiver: int) -> bool:
        return self._comm.copies(receiver)

    def packs(self, other: int) -> bool:
        return self._packs

    def needs_every_wait(self, other: int) -> bool:
        return False

    def send(self, tensor: Tensor, receiver: int) -> Transfer:
        self.sizes.append(tensor.nbytes)
        return Counted(self, self._comm.send(tensor, receiver))

    def recv(self, tensor: Tensor, sender: int) -> Transfer:
        return Counted(self, self._comm.recv(tensor, sender))

    def fail(self, report: str) -> None:
        self._comm.fail(report)

    def close(self) -> None:
        self._comm.close()


class Counted:
    """A transfer whose waits are counted."""

    def __init__(self, comm: PackingComm, transfer: Transfer) -> None:
        self._comm, self._transfer = comm, transfer

    def wait(self, described: Any) -> None:
        self._comm.num_waits += 1
        self._transfer.wait(described)


class Two(nn.Module):
    """Two tensors that need gradients, and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor | None = None, mask: Any = None) -> Any:
        x = self.layer(x)
        return x, x.double() if y is None else y * 2, x > 0


def last_loss(outputs: Any, target: Tensor) -> Tensor:
    x, y, mask = outputs
    return ((x + y.float()) * mask - target).square().mean()


def run(group: LocalGroup, packs: bool) -> tuple[list[list[int]], list[int], list[Tensor]]:
    """Run three steps; return the sizes sent in each, the waits of each, and the gradients."""
    comm = PackingComm(group.connect(), packs=packs)
    group.connect = lambda: comm  # type: ignore[method-assign]  # There is no other way in.
    torch.manual_seed(group.rank)
    module = Two()
    stage = PipelineStage(module, group.rank, 2, CPU, group=group)
    pipeline = Pipeline(stage, "1F1B", num_microbatches=4, loss_fn=last_loss)
    torch.manual_seed(9)
    x, target = torch.randn(8, 4), torch.randn(8, 4)
    sizes, waits = [], []
    for _ in range(3):
        comm.sizes, comm.num_waits = [], 0
        pipeline.step(x, target=target, return_outputs=False)
        sizes.append(comm.sizes)
        waits.append(comm.num_waits)
    return sizes, waits, [param.grad for param in module.parameters()]


def test_step_sends_one_transfer_for_each_message_where_small_tensors_are_packed() -> None:
    """After the first step, only data travels: 2 x 4 values of 4, 8 and 1 bytes, or gradients."""
    packed, whole = (penstock.local_ranks(2, run, packs) for packs in (True, False))
    for (sizes, _, grads), (_, _, expected) in zip(packed, whole, strict=True):
        assert LETTER_BYTES == sizes[0][0]
        assert [True] * len(grads) == list(map(torch.equal, expected, grads))
    # In order of the tensors: single, double, bool; packed, each begins at a multiple of 64 bytes.
    assert [[128 + 8] * 4] * 2 == packed[0][0][1:]
    assert [[64 + 64] * 4] * 2 == packed[1][0][1:]
    assert [[32, 64, 8] * 4] * 2 == whole[0][0][1:]


def test_only_the_last_transfer_of_a_message_and_unproven_sends_are_waited_for() -> None:
    """Rank 0 has four gradients to wait for; each shows that an activation has arrived.

    Rank 1 waits for four activations, and at the end for the last two of its gradients: no
    activation was sent after they had arrived.
    """
    for packs, num_transfers in ((True, 1), (False, 2)):
        (_, first, _), (_, last, _) = penstock.local_ranks(2, run, packs)
        assert [4, 4] == first[1:]
        assert [4 + 2 * num_transfers] * 2 == last[1:]


def test_gradient_that_is_never_sent_proves_nothing() -> None:
    """Over gloo, sends were given up under way when the first stage had nothing to train."""

    def main(group: LocalGroup) -> int:
        comm = PackingComm(group.connect(), packs=True)
        group.connect = lambda: comm  # type: ignore[method-assign]
        layer = nn.Linear(4, 4).requires_grad_(group.rank > 0)
        stage = PipelineStage(layer, group.rank, 2, CPU, group=group)
        loss_fn = nn.functional.mse_loss
        pipeline = Pipeline(stage, "1F1B", num_microbatches=4, loss_fn=loss_fn)
        for _ in range(2):
            comm.num_waits = 0
            pipeline.step(torch.ones(8, 4), target=torch.ones(8, 4), return_outputs=False)
        return comm.num_waits

    assert [4, 4] == penstock.local_ranks(2, main)
