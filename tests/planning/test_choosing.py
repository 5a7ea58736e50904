"""Which choices are searched, and which of them are kept."""

from math import inf

from limits import HANG_S
from penstock import CostTable, Placement
from penstock.planning.choosing import Limits, choose
from penstock.planning.stage_sources import Choice

# Its bound is 448, but the best schedule that is found takes 476.
UNREACHED = CostTable(
    forward=[15, 14, 20],
    backward_input=[7, 16, 19],
    backward_weight=[14, 4, 8],
    after_forward=[9, 9, 8],
    after_input=[7, 4, 2],
    delay=[4, 3],
)


def choice(costs: CostTable, num_microbatches: int, cap: float = inf) -> Choice:
    placement = Placement.linear(3)
    return Choice(num_microbatches, placement, costs, (cap,) * 3, (0.0,) * 3, None, ())


def taking(time: float, num_microbatches: int) -> Choice:
    """Only the first rank has work, so that every schedule takes as long as the bound says."""
    work = [time / num_microbatches, 0, 0]
    costs = CostTable(forward=work, backward_input=[0] * 3, backward_weight=[0] * 3)
    return choice(costs, num_microbatches)


def limits(keep: int) -> Limits:
    return Limits(seconds=HANG_S, effort=1.0, keep=keep)


def test_cut_that_is_faster_in_the_end_is_kept_though_its_bound_is_higher() -> None:
    promising, faster = choice(UNREACHED, 4, cap=15), taking(456, 4)
    outcome = choose([promising, faster], limits(keep=1))
    assert [faster] == [found.choice for found in outcome.found]
    assert 448 == outcome.lower_bound


def test_shape_is_searched_unless_its_bound_is_above_all_that_would_be_kept() -> None:
    promising, best, second = choice(UNREACHED, 4, cap=15), taking(450, 2), taking(456, 3)
    outcome = choose([promising, best, second, taking(999, 1)], limits(keep=2))
    assert [best, second] == [found.choice for found in outcome.found]
