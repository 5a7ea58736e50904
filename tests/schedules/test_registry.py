"""Names of algorithms, and what they say of numbers that they cannot work with."""

import re

import pytest

from penstock import schedules, simulate
from penstock.errors import ScheduleError
from penstock.schedules import REGISTRY


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


def test_generator_is_found_by_every_spelling_of_its_names() -> None:
    for generator in REGISTRY:
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


def test_generator_says_where_it_is_from_and_what_it_costs() -> None:
    for generator in REGISTRY:
        assert generator.source != "", generator
        assert generator.bubble is not None, generator
        assert generator.peak is not None, generator
        assert f"<schedule generator {generator.name}>" == repr(generator)


# A name, and an alias.
@pytest.mark.parametrize(("name", "meant"), [("ZB-H22", "ZB-H2"), ("inferenc", "ForwardOnly")])
def test_unknown_name_is_rejected_with_one_that_is_close(name: str, meant: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        schedules.get(name)
    known = ", ".join(schedules.names())
    expected = (
        f"There is no schedule named {name!r}. Did you mean {meant}? The known ones are {known}."
    )
    assert expected == str(caught.value)


@pytest.mark.parametrize("name", ["", "qqqqqq"])
def test_unknown_name_that_is_close_to_none_is_rejected_without_a_guess(name: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        schedules.get(name)
    known = ", ".join(schedules.names())
    assert f"There is no schedule named {name!r}. The known ones are {known}." == str(caught.value)


def test_fewer_than_one_rank_is_rejected() -> None:
    with pytest.raises(ScheduleError, match=r"^num_ranks is 0\. GPipe needs at least 1\.$"):
        schedules.get("GPipe")(num_ranks=0, num_microbatches=8)


def test_fewer_microbatches_than_needed_are_rejected() -> None:
    for generator in REGISTRY:
        fewest = generator.min_microbatches(schedules.Shape(4, 1, generator.stages_per_rank))
        expected = (
            f"num_microbatches is {fewest - 1}. {generator.name} needs at least {fewest} "
            "where num_ranks is 4. Cut the batch into more microbatches, or use fewer ranks."
        )
        with pytest.raises(ScheduleError, match=f"^{re.escape(expected)}$"):
            generator(num_ranks=4, num_microbatches=fewest - 1)
        assert fewest == generator(num_ranks=4, num_microbatches=fewest).num_microbatches


def test_dual_pipe_v_needs_two_microbatches_for_each_rank() -> None:
    dual_pipe_v = schedules.get("DualPipeV")
    with pytest.raises(ScheduleError, match=r"num_microbatches is 9\. .* needs at least 10 where"):
        dual_pipe_v(num_ranks=5, num_microbatches=9)


@pytest.mark.parametrize(
    ("name", "stages_per_rank", "needed"),
    [
        ("LoopedBFS", 0, "at least 1."),
        (
            "ZB-V",
            3,
            "2. Leave it out, or use a schedule that takes any number, such as Interleaved1F1B.",
        ),
    ],
)
def test_stages_per_rank_that_do_not_fit_are_rejected(
    name: str, stages_per_rank: int, needed: str
) -> None:
    expected = f"stages_per_rank is {stages_per_rank}. {name} needs {needed}"
    with pytest.raises(ScheduleError, match=f"^{re.escape(expected)}$"):
        schedules.get(name)(num_ranks=2, num_microbatches=8, stages_per_rank=stages_per_rank)


def test_stages_per_rank_left_out_are_those_of_the_algorithm() -> None:
    for generator in REGISTRY:
        v = generator.stages_per_rank
        expected = generator(num_ranks=3, num_microbatches=8, stages_per_rank=v)
        made = generator(num_ranks=3, num_microbatches=8)
        assert expected == made
        assert 3 * v == made.num_stages
        assert {v} == {len(made.placement.stages_of(rank)) for rank in range(3)}


def test_interleaved_zero_bubble_with_one_stage_per_rank_is_zb_h1() -> None:
    interleaved = schedules.get("InterleavedZeroBubble")
    for p, m in ((1, 4), (3, 1), (3, 3), (3, 7), (4, 8)):
        expected = schedules.get("ZB-H1")(num_ranks=p, num_microbatches=m)
        assert expected == interleaved(num_ranks=p, num_microbatches=m, stages_per_rank=1)


def test_interleaved_1f1b_with_one_stage_per_rank_takes_as_long_as_1f1b() -> None:
    interleaved = schedules.get("Interleaved1F1B")
    for p, m in ((1, 4), (3, 3), (3, 7), (4, 8)):
        expected = simulate(schedules.get("1F1B")(num_ranks=p, num_microbatches=m))
        made = interleaved(num_ranks=p, num_microbatches=m, stages_per_rank=1)
        assert expected.makespan == simulate(made).makespan
