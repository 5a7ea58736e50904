"""The costs of stages that `--costs`, `--delay` and `--gather-costs` give."""

from dataclasses import replace
from pathlib import Path

from penstock.cli.files import read_text
from penstock.costs import CostTable
from penstock.costs.amounts import LARGEST_AMOUNT, to_memory, to_times
from penstock.costs.given_costs import GivenCosts, ShareCosts, TableCosts, with_delay
from penstock.costs.units import MemoryUnit
from penstock.errors import OptionError, PipelineError
from penstock.timeline import Recording
from penstock.timeline.recording import holds_recording


def read_costs(text: str | None, delay: float | None) -> GivenCosts:
    """Return the costs that the options give; without any, F, I and W take 1 each."""
    times = (1.0, 1.0, 1.0) if text is None else to_times(text)
    if times is not None:
        if not all(0 <= time <= LARGEST_AMOUNT for time in times):
            raise OptionError(
                f"--costs is {text}. Expected times that are not negative, up to "
                f"{LARGEST_AMOUNT:g}."
            )
        forward, backward_input, backward_weight = ((time,) for time in times)
        return ShareCosts(forward, backward_input, backward_weight, delay=delay or 0.0)
    assert text is not None
    if not Path(text).exists():
        raise OptionError(
            f"--costs is {text!r}, which is neither a file nor three numbers. Expected the times "
            "of F, I and W, such as 1,1,0.5, or a file that CostTable.save wrote."
        )
    return load_costs(text, delay)


def with_gather_costs(costs: GivenCosts, text: str | None) -> GivenCosts:
    """Return the costs with those of gathers that the option gives, if it is given."""
    if text is None:
        return costs
    *times, memory = text.split(",")
    held = to_times(f"{','.join(times)},0")
    if held is None or not all(0 <= time <= LARGEST_AMOUNT for time in held):
        raise OptionError(
            f"--gather-costs is {text!r}. Expected the times of a gather and of a reduction, and "
            "the memory of what is gathered, such as 0.5,0.5,2."
        )
    gather, reduce, gathered = held
    if memory.strip() != "0":
        gathered = to_memory(
            "--gather-costs", memory, in_microbatches=isinstance(costs, ShareCosts)
        )
    if isinstance(costs, ShareCosts):
        return replace(costs, gather=(gather,), reduce=(reduce,), gathered=(gathered,))
    return replace(costs, of_gathers=(gather, reduce, gathered))


def choose_stages_per_rank(costs: GivenCosts, num_ranks: int, wanted: int | None) -> int | None:
    """Return `wanted`, or the number that a file of costs has per rank, if more than 1."""
    if wanted is not None or isinstance(costs, ShareCosts):
        return wanted
    count, rest = divmod(costs.costs.num_stages, num_ranks)
    return count if count > 1 and not rest else None


def costs_of(recording: Recording, delay: float | None) -> TableCosts:
    """Return the costs that a run measured, in seconds; memory is in bytes if it was measured."""
    unit: MemoryUnit = "bytes" if recording.memory else ""
    costs = with_delay(recording.costs(), delay)
    return TableCosts(costs, "s", recording.schedule, memory_unit=unit)


def load_costs(path: str, delay: float | None) -> TableCosts:
    """Load costs from a file of costs or a recording."""
    text = read_text(path)
    try:
        if holds_recording(text):
            return costs_of(Recording.from_json(text), delay)
        return TableCosts(with_delay(CostTable.from_json(text), delay))
    except PipelineError as exc:
        raise OptionError(f"The costs in {path} cannot be read: {exc}") from exc
