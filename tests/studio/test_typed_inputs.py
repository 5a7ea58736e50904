"""What is typed in is checked field by field."""

import pytest

from penstock.costs import Work
from penstock.costs.given_costs import ShareCosts
from penstock.errors import FieldError
from penstock.ir import Placement
from penstock.schedules import names
from penstock.studio.typed_inputs import DEFAULTS, fields_of, read_inputs


def problems_of(**fields: str) -> dict[str, str]:
    with pytest.raises(FieldError) as caught:
        read_inputs(fields)
    assert str(caught.value) == " ".join(caught.value.problems.values())
    return caught.value.problems


def test_defaults_are_all_right() -> None:
    assert read_inputs(DEFAULTS) == read_inputs({})
    inputs = read_inputs({})
    assert ("ZB-V", "1F1B", None) == (inputs.schedule, inputs.beside, inputs.stages_per_rank)
    question = inputs.question
    assert (4, 8, None) == (question.num_ranks, question.num_microbatches, question.memory)


@pytest.mark.parametrize(
    ("field", "text", "expected"),
    [
        ("ranks", "", "ranks is empty. Expected a whole number from 1 to 64."),
        ("ranks", "0", "ranks is '0'. Expected a whole number from 1 to 64."),
        ("ranks", "65", "Expected a whole number from 1 to 64."),
        ("ranks", "²", "Expected a whole number"),
        ("ranks", "9" * 5000, "ranks is '9999999999999999999999999999999999999...'."),
        ("microbatches", "x", "microbatches is 'x'. Expected a whole number from 1 to 512."),
        ("stages_per_rank", "9", "stages_per_rank is '9'. Expected a whole number from 1 to 8."),
        ("forward", "", "forward is empty. Expected a number from 0 to 1e+15, or several"),
        ("forward", "-1", "forward is '-1'. Expected a number from 0"),
        ("forward", "inf", "Expected a number"),
        ("forward", "1e16", "forward is '1e16'. Expected a number from 0 to 1e+15"),
        (
            "backward_input",
            "1,,2",
            "several along the model, separated by commas: 1,1,2 (at most 512).",
        ),
        ("activation", ",".join("1" * 513), "activation is '1,1,1,"),
        ("delay", "1,2", "delay is '1,2'. Expected a number from 0 to 1e+15."),
        ("overlap_saving", "1.1", "overlap_saving is '1.1'. Expected a number from 0 to 1."),
        ("memory", "0", "memory is '0'. Expected a number above 0"),
        ("memory", "4,4", "memory has 2 numbers, but there are 4 ranks. Expected one for all"),
        ("memory", "9" * 3000, "memory is '9999999999999999999999999999999999999...'."),
        ("memory", "1e12TiB", "memory is '1e12TiB'. Expected a number above 0, up to 1e+15"),
        ("memory", "8GiB", "memory is '8GiB'. Expected a number in the unit of activation"),
        (
            "lengths",
            "512,x",
            "lengths is '512,x'. Expected the tokens of each microbatch, separated",
        ),
        ("lengths", "1,,2", "as in 512,2048,1024: below 1e9, and for at most 512 microbatches."),
        ("lengths", "9" * 5000, "lengths is '9999999999999999999999999999999999999...'."),
        ("lengths", ",".join("1" * 513), "lengths is '1,1,1,"),
        ("lengths", "0,1", "lengths is '0,1'. Expected whole numbers above 0, separated by commas"),
        (
            "lengths",
            "1,2,3",
            "lengths has 3 numbers, but there are 8 microbatches. Expected one for",
        ),
        ("work", "", "work is ''. Expected the work per token and per squared length, at least 0"),
        ("work", "0,0", "work is '0,0'. Expected the work per token"),
        ("work", "1,1e16", "work is '1,1e16'. Expected the work per token"),
        ("work", "1,0.5", "work is given, but there are no lengths. Give lengths too."),
        ("recompute", "maybe", "recompute is 'maybe'. Expected one of no, yes."),
        ("recompute_time", "-1", "recompute_time is '-1'. Expected a number from 0"),
        ("after_dropping", "", "after_dropping is empty. Expected a number from 0"),
        ("clock", "sun", "clock is 'sun'. Expected one of makespan, span."),
        ("units", "feet", "units is 'feet'. Expected one of any, seconds, seconds and bytes."),
        ("search", "long", "search is 'long'. Expected one of off, quick, thorough."),
        ("schedule", "zbv", "schedule is 'zbv'. Expected one of GPipe, 1F1B,"),
        ("beside", "<b>", "beside is '<b>'. Expected one of nothing, GPipe,"),
        ("rank", "4", "There is no field rank. Expected some of schedule, beside, ranks,"),
    ],
)
def test_wrong_value_is_the_problem_of_its_field(field: str, text: str, expected: str) -> None:
    problems = problems_of(**{field: text})
    assert [field] == list(problems)
    assert expected in problems[field]
    assert len(problems[field]) < 400


def test_all_problems_are_told_at_once() -> None:
    assert {"ranks", "delay", "memory"} == {*problems_of(ranks="x", delay="x", memory="x")}


def test_too_many_ranks_and_microbatches_are_a_problem_only_together() -> None:
    read_inputs({"ranks": "64", "microbatches": "128"})
    read_inputs({"ranks": "64", "microbatches": "16", "stages_per_rank": "8"})
    for other in ({"microbatches": "129"}, {"microbatches": "17", "stages_per_rank": "8"}):
        problems = problems_of(ranks="64", **other)
        expected = "The product of ranks, microbatches and stages per rank is 8,"
        assert problems["microbatches"].startswith(expected)


def test_numbers_that_are_wrong_by_themselves_are_not_looked_at_together() -> None:
    assert {"ranks"} == {*problems_of(ranks="many", memory="1,2,3")}
    assert {"stages_per_rank"} == {
        *problems_of(ranks="64", microbatches="256", stages_per_rank="x")
    }


def test_lengths_are_the_sizes_of_the_microbatches() -> None:
    inputs = read_inputs({"microbatches": "3", "lengths": "1, 2,3", "work": "1,1"})
    expected = ShareCosts().for_lengths([1, 2, 3], Work(1, 1))
    assert expected == inputs.question.costs


def test_lengths_that_are_wrong_are_the_only_problem() -> None:
    assert {"lengths"} == {*problems_of(lengths="x", work="1,1")}


def test_recompute_is_for_searches() -> None:
    assert [False, True] == [
        read_inputs({"recompute": text}).question.recompute for text in ("no", "yes")
    ]


def test_share_may_be_all_and_nothing() -> None:
    for text in ("0", "1"):
        costs = read_inputs({"overlap_saving": text}).question.costs
        assert float(text) == costs.table(Placement.linear(2)).overlap_saving


def test_search_is_quick_unless_it_is_to_be_thorough() -> None:
    quick, thorough = (read_inputs({"search": name}) for name in ("quick", "thorough"))
    assert (0.1, 10.0) == (quick.effort, quick.seconds)
    assert (1.0, 60.0) == (thorough.effort, thorough.seconds)


def test_full_backward_costs_as_much_as_its_halves_unless_it_is_given() -> None:
    def backward(**fields: str) -> tuple[float, ...]:
        return read_inputs(fields).question.costs.table(Placement.linear(2)).backward

    assert (3.0, 3.0) == backward(backward_weight="2")
    assert (1.5, 1.8) == backward(backward_weight="2", backward="1.5,1.8")


def test_blanks_around_numbers_do_not_matter() -> None:
    inputs = read_inputs({"ranks": " 8 ", "forward": "1, 2 ,3", "memory": " 4 "})
    assert 8 == inputs.question.num_ranks
    assert (1.0, 2.0, 3.0) == inputs.question.costs.table(Placement.linear(3)).forward
    assert 4.0 == inputs.question.memory


def test_memory_may_have_units_and_be_different_for_each_rank() -> None:
    inputs = read_inputs({"ranks": "2", "memory": "1KiB,2KiB", "units": "seconds and bytes"})
    assert (1024.0, 2048.0) == inputs.question.memory


def test_what_is_drawn_already_is_not_drawn_beside_itself() -> None:
    assert "" == read_inputs({"schedule": "ZB-V", "beside": "ZB-V"}).beside


def test_fields_of_costs_are_read_as_these_costs() -> None:
    costs = ShareCosts(
        forward=(1.0, 2.5),
        backward_input=(0.25,),
        backward_weight=(0.0, 1.0, 3.0),
        backward=(1.25, 4.0),
        after_forward=(1e-9, 1234567.125),
        after_input=(7.0,),
        delay=0.125,
        overlap_saving=0.5,
        recompute=(0.75, 2.0),
        after_dropping=(0.5,),
    )
    assert costs == read_inputs(fields_of(costs)).question.costs
    assert ShareCosts() == read_inputs(fields_of(ShareCosts())).question.costs


def test_every_schedule_can_be_chosen() -> None:
    for name in (*names(), "searched"):
        inputs = read_inputs({"schedule": name, "beside": ""})
        assert (name, "") == (inputs.schedule, inputs.beside)
