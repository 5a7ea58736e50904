"""Docstrings look on the site as their authors meant them."""

import pytest

from docstrings import escape, first_paragraph, to_markdown


def test_example_is_a_block_of_code() -> None:
    docstring = "Adds.\n\n>>> add(1, 2)\n3"
    assert "Adds.\n\n```pycon\n>>> add(1, 2)\n3\n```" == to_markdown(docstring)


def test_each_numbered_step_begins_a_line() -> None:
    docstring = "Steps:\n[1] the first\n    goes on;\n[2] the second."
    expected = "Steps:  \n\\[1\\] the first\n    goes on;  \n\\[2\\] the second."
    assert expected == to_markdown(docstring)


def test_drawing_stays_as_it_is() -> None:
    docstring = "Shows:\n\n    rank 0  F0 * [1] <"
    assert docstring == to_markdown(docstring)


def test_text_has_no_meaning_in_markdown_unless_it_is_in_backticks() -> None:
    assert "a\\_b \\* &lt;c&gt; `d_e * [f]`" == escape("a_b * <c> `d_e * [f]`")


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        ("Its *form* is, *as a whole*.", "Its *form* is, *as a whole*."),
        ("f(\\*args, \\*\\*kwargs)", "f(*args, **kwargs)"),
        ("2 \\* 3 \\* 4 and a\\*b\\*c", "2 * 3 * 4 and a*b*c"),
    ],
)
def test_emphasis_stays_and_other_asterisks_are_asterisks(expected: str, text: str) -> None:
    assert expected == escape(text)


def test_first_paragraph_is_one_line_that_a_table_can_hold() -> None:
    assert "One \\| two, three." == first_paragraph("\nOne | two,\n  three.\n\nMore.")
