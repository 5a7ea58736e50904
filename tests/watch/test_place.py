"""The page in which a rank writes where it is."""

from penstock.watch.place import ACTION, OUTSIDE, SIZE, Place, as_action, read_place, read_stages


def test_a_rank_that_has_done_nothing_is_outside_of_a_step() -> None:
    memory = bytearray(SIZE)
    Place(memory)
    assert OUTSIDE == read_place(memory)
    assert "" == read_stages(memory)


def test_the_action_of_a_step_is_read() -> None:
    place = Place.unread()
    place.enter_step()
    assert "in step 1" == read_place(place.memory)
    place.memory[ACTION] = as_action("1F3 (forward of microbatch 3 on stage 1)")
    assert "in step 1, in 1F3 (forward of microbatch 3 on stage 1)" == read_place(place.memory)
    place.leave_actions()
    assert "in step 1" == read_place(place.memory)
    place.enter_step()
    assert "in step 2" == read_place(place.memory)


def test_what_a_rank_does_inside_something_else_ends_before_it() -> None:
    place = Place.unread()
    outer = place.enter("in saving a checkpoint")
    inner = place.enter("in waiting for others")
    assert "in waiting for others" == read_place(place.memory)
    place.go_back(inner)
    assert "in saving a checkpoint" == read_place(place.memory)
    place.go_back(outer)
    assert OUTSIDE == read_place(place.memory)


def test_stages_are_read_in_words() -> None:
    place = Place.unread()
    place.hold([3])
    assert "stage 3" == read_stages(place.memory)
    place.hold([0, 7])
    assert "stages 0, 7" == read_stages(place.memory)


def test_texts_of_any_length_and_alphabet_leave_the_others_alone() -> None:
    place = Place.unread()
    place.hold(range(1000))
    place.enter("in ½" * 1000)
    place.enter_step()
    place.memory[ACTION] = as_action("½" * 1000)
    assert SIZE == len(place.memory)
    assert "in step 1, in " + "?" * 128 == read_place(place.memory)
    assert read_stages(place.memory).startswith("stages 0, 1, 2, ")
    assert 64 == len(read_stages(place.memory))
