"""Docstrings look on the site as their authors meant them."""

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
    assert "a\\_b \\* \\<c> `d_e * [f]`" == escape("a_b * <c> `d_e * [f]`")


def test_first_paragraph_is_one_line_that_a_table_can_hold() -> None:
    assert "One \\| two, three." == first_paragraph("\nOne | two,\n  three.\n\nMore.")
