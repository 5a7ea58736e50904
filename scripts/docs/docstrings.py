"""Docstrings as Markdown, for the pages of the source files and, as an extension, for mkdocstrings.

Docstrings are written to be read in the source. Two habits of theirs mean something else in
Markdown: examples at `>>>` would be quotations, and steps that begin with `[1]` would run together.
"""

import html
import re
from typing import Any

import griffe

_PARAGRAPHS = re.compile(r"\n{2,}")
_KEEPS_MEANING = re.compile(r"(`[^`]+`|(?<![\w*])\*\w[\w -]*\*(?![\w*]))")


def to_markdown(docstring: str) -> str:
    """The docstring as Markdown that looks as its author meant it."""
    return "\n\n".join(map(_convert_paragraph, _PARAGRAPHS.split(docstring.strip("\n"))))


def first_paragraph(docstring: str) -> str:
    """What the docstring says first, as Markdown in one line that may stand in a table."""
    return escape(" ".join(_PARAGRAPHS.split(docstring.strip())[0].split()))


def escape(text: str) -> str:
    """Plain text as Markdown; only what stands in backticks, and *emphasis*, keeps its meaning."""
    parts = _KEEPS_MEANING.split(text)
    return "".join(
        part if number % 2 else re.sub(r"([\\*_\[\]|#])", r"\\\1", html.escape(part, quote=False))
        for number, part in enumerate(parts)
    )


def _convert_paragraph(paragraph: str) -> str:
    if paragraph.startswith(">>>"):
        return f"```pycon\n{paragraph}\n```"
    if paragraph.startswith("    "):
        return paragraph  # A drawing: code, in Markdown too.
    return escape(re.sub(r"\n(?=\[\d+\] )", "  \n", paragraph))


class Docstrings(griffe.Extension):
    """Hands mkdocstrings the docstrings as Markdown."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe once for everything that it has read."""
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value)
