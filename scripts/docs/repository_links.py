"""Links between files of the repository, which lead to other places on the site.

The docs link to files around them, as `../examples/train.py`: that works where the repository is
read. On the site these files have pages of their own, so each such link is led to its page.
A link to what does not exist stays as it is, and mkdocs, being strict, stops at it.
"""

import posixpath
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

_CODE = re.compile(r"(^(?P<fence>`{3,}|~{3,}).*?^(?P=fence)|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
# The path of a link, without its anchor. An address with a scheme is no path and matches up to
# its colon; no file is called so, and it stays as it is.
_LINK = re.compile(r'(?P<opening>\]\(|\b(?:src|srcset|href)=")(?P<path>[^()\s"#:]+)')
# A link that is called as the document it leads to.
_NAMED = re.compile(r"\[[\w/.]+\.md\](?P<rest>\((?P<path>[^()\s#:]+\.md))")


def find_linked_files(root: Path, documents: Iterable[str]) -> set[str]:
    """The files outside of docs/ that the documents, or documents that they link to, link to.

    A link to a folder is one to the files in it.
    """
    left, seen = list(documents), set(documents)
    found: set[str] = set()
    while left:
        document = left.pop()
        text = (root / document).read_text(encoding="utf-8")
        targets = {path for target in _targets(text, document) for path in _files_at(root, target)}
        found |= targets - seen
        left += sorted(path for path in targets - seen if path.endswith(".md"))
        seen |= targets
    return found


def name_links(text: str, *, document: str, title_of: Callable[[str], str]) -> str:
    """Calls links to documents by their titles, where they are called by their files' names."""

    def name(link: re.Match[str]) -> str:
        return f"[{title_of(_resolve(link['path'], document))}]{link['rest']}"

    return _outside_code(text, lambda piece: _NAMED.sub(name, piece))


def lead_links(text: str, *, document: str, page: str, page_of: Callable[[str], str | None]) -> str:
    """Leads the links of `document` to pages of the site, seen from `page`.

    `page_of` tells where the site has a path of the repository, or None if it has not.
    """

    def lead(link: re.Match[str]) -> str:
        target = page_of(_resolve(link["path"], document))
        if target is None:
            return link[0]
        return link["opening"] + posixpath.relpath(target, posixpath.dirname(page) or ".")

    return _outside_code(text, lambda piece: _LINK.sub(lead, piece))


def _outside_code(text: str, change: Callable[[str], str]) -> str:
    pieces = []
    end = 0
    for code in _CODE.finditer(text):
        pieces += [change(text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*pieces, change(text[end:])])


def _targets(text: str, document: str) -> Iterator[str]:
    for link in _LINK.finditer(_CODE.sub("", text)):
        yield _resolve(link["path"], document)


def _files_at(root: Path, target: str) -> list[str]:
    if target in {"docs", ".."} or target.startswith(("docs/", "../")):
        return []
    if (root / target).is_dir():
        files = (root / target).iterdir()
        # An empty file, such as py.typed, has nothing to show.
        return [f"{target}/{path.name}" for path in files if path.is_file() and path.stat().st_size]
    return [target] if (root / target).is_file() else []


def _resolve(path: str, document: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(document), path))
