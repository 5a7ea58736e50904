"""The schedule of a run, made and checked before any process starts."""

from dataclasses import dataclass
from pathlib import Path

from penstock import schedules
from penstock.errors import OptionError, ScheduleError
from penstock.ir import Placement, Schedule
from penstock.schedules.given_shape import find_mismatch, is_auto, placement_of_auto
from penstock.training.checks import check_size
from penstock.training.gpt_sizes import GptConfig
from penstock.training.settings import TrainConfig, option_of


@dataclass(frozen=True, slots=True)
class Orders:
    """The placement of a run, and its schedule."""

    placement: Placement
    schedule: Schedule | None
    """None if it is to be found while training."""
    num_microbatches: int


def choose_orders(config: TrainConfig) -> Orders:
    """Return the schedule of the options; raise an error if it cannot train the model."""
    check_size(config.num_ranks, config.num_microbatches)
    if is_auto(config.schedule):
        placement = placement_of_auto(config.num_ranks, config.stages_per_rank)
        orders = Orders(placement, None, config.num_microbatches)
    else:
        schedule = _read(config) if is_file(config.schedule) else _make(config)
        schedule.verify()
        _check_trains(config, schedule)
        orders = Orders(schedule.placement, schedule, config.num_microbatches)
    num_stages = orders.placement.num_stages
    model = config.model
    if isinstance(model, GptConfig) and num_stages > model.max_stages:
        raise OptionError(
            f"{config.schedule} on {config.num_ranks} ranks has {num_stages} stages, but a model "
            f"of {model.num_layers} layers can be cut into at most {model.max_stages}. Give more "
            "--layers, or fewer --ranks or --stages-per-rank."
        )
    return orders


def is_file(name: str) -> bool:
    """Return whether a schedule is given as a file."""
    return name.lower().endswith(".csv")


def _make(config: TrainConfig) -> Schedule:
    try:
        generator = schedules.get(config.schedule)
    except ScheduleError as error:
        raise OptionError(
            f"{error} Or set --schedule to auto, or to a file that ends in .csv."
        ) from error
    return generator(
        num_ranks=config.num_ranks,
        num_microbatches=config.num_microbatches,
        stages_per_rank=config.stages_per_rank,
    )


def read_schedule(path: str) -> Schedule:
    """Read the schedule in a file, in PyTorch's text format."""
    try:
        return Schedule.from_csv(Path(path).read_text())
    except (OSError, UnicodeError, ScheduleError) as error:
        raise OptionError(
            f"the schedule {path} cannot be read: {error} Expected a file in PyTorch's text format."
        ) from error


def _read(config: TrainConfig) -> Schedule:
    schedule = read_schedule(config.schedule)
    wrong = find_mismatch(
        schedule,
        num_ranks=config.num_ranks,
        num_microbatches=config.num_microbatches,
        stages_per_rank=config.stages_per_rank,
    )
    if wrong is not None:
        raise OptionError(
            f"--{option_of(wrong.name)} is {wrong.given}, but the schedule in {config.schedule} is "
            f"for {wrong.found}. Leave it out, or give another schedule."
        )
    return schedule


def _check_trains(config: TrainConfig, schedule: Schedule) -> None:
    if not schedule.has_backward:
        raise OptionError(
            f"the schedule {config.schedule} has no backward, so nothing would be learned. "
            "Give another, such as ZB-V."
        )
