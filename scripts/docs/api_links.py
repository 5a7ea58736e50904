"""Links from the names of the API to their source."""

import re
from collections.abc import Callable
from html import escape

_HEADING = re.compile(
    r'(?P<heading><h\d id="(?P<path>penstock[\w.]*)" class="doc doc-heading">.*?)(?P<end></h\d>)',
    re.DOTALL,
)


def add_source_links(html: str, address_of: Callable[[str], str | None]) -> str:
    """Gives each heading that mkdocstrings made a link to where its name is defined."""

    def add(found: re.Match[str]) -> str:
        address = address_of(found["path"])
        if address is None:  # An attribute: it is seen at its class.
            return found[0]
        # The search would find the word in every heading.
        link = f'<a class="source-link" href="{escape(address)}" data-search-exclude>source</a>'
        return found["heading"] + link + found["end"]

    return _HEADING.sub(add, html)
