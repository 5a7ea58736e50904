"""Names of algorithms, and what they say of numbers that they cannot work with."""

import re

import pytest

from penstock import schedules, simulate
from penstock.errors import ScheduleError
from penstock.schedules import REGISTRY, Generator

every_generator = pytest.mark.parametrize("generator", REGISTRY, ids=lambda each: each.name)


def spellings(name: str) -> list[str]:
    return [
        name,
        name.upper(),
        name.lower(),
        name.replace("-", ""),
        name.replace("-", "_"),
        name.replace("-", " "),
        "-".join(name),
        f" {name}_",
    ]


@every_generator
def test_generator_is_found_by_every_spelling_of_its_names(generator: Generator) -> None:
    for known in (generator.name, *generator.aliases):
        for name in spellings(known):
            assert generator is schedules.get(name)


def test_names_and_aliases_are_different_in_every_spelling() -> None:
    known = [name for each in REGISTRY for name in (each.name, *each.aliases)]
    keys = [re.sub("[-_ ]", "", name).lower() for name in known]
    assert sorted(set(keys)) == sorted(keys)


def test_names_are_those_of_the_registry_in_its_order() -> None:
    assert [generator.name for generator in REGISTRY] == schedules.names()


def test_changing_the_list_of_names_changes_no_later_list() -> None:
    expected = schedules.names()
    schedules.names().clear()
    assert expected == schedules.names()


@every_generator
def test_generator_says_where_it_is_from_and_what_it_costs(generator: Generator) -> None:
    assert generator.source != ""
    assert generator.bubble is not None
    assert generator.peak is not None
    assert f"<schedule generator {generator.name}>" == repr(generator)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("ZB-H22", "ZB-H2"),
        ("1F1C", "1F1B"),
        ("Interleaved-1F1", "Interleaved1F1B"),
        ("gpip", "GPipe"),
        ("inferenc", "ForwardOnly"),  # By its alias.
    ],
)
def test_unknown_name_is_rejected_with_one_that_is_close(name: str, meant: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        schedules.get(name)
    known = ", ".join(schedules.names())
    expected = f"There is no schedule named {name!r}. Did you mean {meant}? Known are {known}."
    assert expected == str(caught.value)


@pytest.mark.parametrize("name", ["", " ", "qqqqqq", "42"])
def test_unknown_name_that_is_close_to_none_is_rejected_without_a_guess(name: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        schedules.get(name)
    known = ", ".join(schedules.names())
    assert f"There is no schedule named {name!r}. Known are {known}." == str(caught.value)


@every_generator
@pytest.mark.parametrize("num_ranks", [0, -1])
def test_fewer_than_one_rank_is_rejected(generator: Generator, num_ranks: int) -> None:
    expected = f"num_ranks is {num_ranks}. {generator.name} needs at least 1."
    with pytest.raises(ScheduleError, match=f"^{re.escape(expected)}$"):
        generator(num_ranks=num_ranks, num_microbatches=8)


@every_generator
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_fewer_microbatches_than_needed_are_rejected(generator: Generator, num_ranks: int) -> None:
    v = generator.stages_per_rank
    fewest = generator.min_microbatches(schedules.Shape(num_ranks, 1, v))
    for num_microbatches in {0, -1, fewest - 1}:
        expected = (
            f"num_microbatches is {num_microbatches}. {generator.name} needs at least {fewest} "
            f"where num_ranks is {num_ranks}. Cut the batch into more microbatches, or use fewer "
            "ranks."
        )
        with pytest.raises(ScheduleError, match=f"^{re.escape(expected)}$"):
            generator(num_ranks=num_ranks, num_microbatches=num_microbatches)
    made = generator(num_ranks=num_ranks, num_microbatches=fewest)
    assert fewest == made.num_microbatches


def test_dual_pipe_v_needs_two_microbatches_for_each_rank() -> None:
    dual_pipe_v = schedules.get("DualPipeV")
    with pytest.raises(ScheduleError, match=r"num_microbatches is 9\. .* needs at least 10 where"):
        dual_pipe_v(num_ranks=5, num_microbatches=9)


@every_generator
def test_stages_per_rank_that_do_not_fit_are_rejected(generator: Generator) -> None:
    takes_any = generator.takes_any_stages_per_rank
    needed = (
        "at least 1."
        if takes_any
        else f"{generator.stages_per_rank}. "
        "Leave it out, or use a schedule that takes any number, such as Interleaved1F1B."
    )
    wrong = {0, -1} if takes_any else {0, -1, 1, 2, 3} - {generator.stages_per_rank}
    for stages_per_rank in wrong:
        expected = f"stages_per_rank is {stages_per_rank}. {generator.name} needs {needed}"
        with pytest.raises(ScheduleError, match=f"^{re.escape(expected)}$"):
            generator(num_ranks=2, num_microbatches=8, stages_per_rank=stages_per_rank)


@every_generator
def test_stages_per_rank_left_out_are_those_of_the_algorithm(generator: Generator) -> None:
    v = generator.stages_per_rank
    expected = generator(num_ranks=3, num_microbatches=8, stages_per_rank=v)
    made = generator(num_ranks=3, num_microbatches=8)
    assert expected == made
    assert 3 * v == made.num_stages
    assert {v} == {len(made.placement.stages_of(rank)) for rank in range(3)}


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
def test_interleaved_zero_bubble_with_one_stage_per_rank_is_zb_h1(p: int) -> None:
    interleaved = schedules.get("InterleavedZeroBubble")
    for m in (1, p, p + 1, 2 * p + 1, 4 * p):
        expected = schedules.get("ZB-H1")(num_ranks=p, num_microbatches=m)
        assert expected == interleaved(num_ranks=p, num_microbatches=m, stages_per_rank=1)


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
def test_interleaved_1f1b_with_one_stage_per_rank_takes_as_long_as_1f1b(p: int) -> None:
    for m in (p, p + 1, 2 * p + 1, 4 * p):
        expected = simulate(schedules.get("1F1B")(num_ranks=p, num_microbatches=m))
        interleaved = schedules.get("Interleaved1F1B")
        made = interleaved(num_ranks=p, num_microbatches=m, stages_per_rank=1)
        assert expected.makespan == simulate(made).makespan
