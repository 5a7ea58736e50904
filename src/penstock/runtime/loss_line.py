"""Pass the loss of a step from the rank of the last stage to all others.

    linear, loop    0 ◀── 1 ◀── 2 ◀── 3        a V    0 ──▶ 1 ──▶ 2 ──▶ 3

Each rank hands it on to its neighbour, by channels that a pipeline mostly has anyway. Ranks end a
step in about this order, so none waits long for the one before.
"""

from torch import Tensor

from penstock.comm import AbstractComm, Transfer
from penstock.comm.channels import both_ways
from penstock.ir import Rank

_WHAT = "the loss of the step"


class LossLine:
    """The losses that are on their way to the next rank."""

    def __init__(self) -> None:
        self._sent: list[tuple[Transfer, Tensor]] = []

    def pass_on(self, comm: AbstractComm, source: Rank, loss: Tensor) -> Tensor:
        """Return the one value that `loss` has on rank `source`, on every rank.

        All ranks must call it; on the others, the tensor is overwritten.
        """
        here = comm.rank
        neighbours = [rank for rank in (here - 1, here + 1) if 0 <= rank < comm.num_ranks]
        comm.open(both_ways((here, rank) for rank in neighbours))
        self.finish()
        if here != source:
            before = min(neighbours, key=lambda rank: abs(rank - source))
            comm.recv(loss, before).wait(lambda: f"{_WHAT} from rank {before}")
        for after in neighbours:
            if abs(after - source) > abs(here - source):
                self._sent.append((comm.send(loss, after), loss))
        return loss[0].clone()  # The caller may change it while it is sent.

    def finish(self) -> None:
        """Wait until the next ranks have taken what was sent to them."""
        sent, self._sent = self._sent, []
        for transfer, _ in sent:
            transfer.wait(lambda: f"the next rank to take {_WHAT}")
