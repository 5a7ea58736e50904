"""The pages that show the source: one for each file, one for each folder."""

import posixpath
from collections.abc import Iterable, Iterator

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound

from docstrings import escape, first_paragraph, to_markdown
from project_files import Project
from source_files import SourceFile

PACKAGE = "src/penstock"

# Where the text of a file belongs on its page. It goes in when all else is done: it is no Markdown,
# the search is not to find each word of it, and reading it three times would be most of a build.
CODE_PLACE = '<div id="code"></div>'

# What is for what, where no docstring tells it.
_PURPOSES = {
    "LICENSE": "Apache-2.0.",
    "benchmarks": "What was measured: a folder for each question, with its answer.",
    "changelog.d": "What has changed since the last release.",
    "examples": "Scripts to begin with, each for one thing.",
    "tests": "The tests that the docs name; the repository has the others.",
}

# Guides come before source in the results of a search.
_HEAD = "---\nsearch:\n  boost: 0.5\n---\n\n"


def file_uri(path: str) -> str:
    """Where the page of a file is among the pages."""
    return f"source/{path}.md"


def folder_uri(folder: str) -> str:
    """Where the page of a folder is among the pages."""
    return posixpath.join("source", folder, "index.md")


def copied_uri(path: str) -> str:
    """Where a file is that the site has as it is."""
    return f"source/{path}"


def link(text: str, uri: str, page: str, *, line: int | None = None) -> str:
    """A link to another page, as seen from `page`."""
    anchor = f"#L{line}" if line else ""
    target = "" if uri == page else posixpath.relpath(uri, posixpath.dirname(page))
    return f"[{text}]({target}{anchor})"


def format_file(project: Project, path: str) -> str:
    """The page of a file: what it is for, defines and imports, who imports it, and its text."""
    file = project.files[path]
    parts = [f"{_HEAD}# {escape(file.title)}", _place(project, file), to_markdown(file.purpose)]
    if file.names:
        parts += ["## Names", "\n".join(_name_rows(project, file))]
    if imports := list(_import_items(project, path)):
        parts += ["## Imports", "\n".join(imports)]
    if importers := project.importers[path]:
        links = ", ".join(_file_link(project, other, file_uri(path)) for other in importers)
        parts += ["## Imported by", f"{links}."]
    if tests := project.tests_of[path]:
        files = ", ".join(f"`{test}`" for test in tests)
        count = f"{len(tests)} {'file' if len(tests) == 1 else 'files'}"
        parts.append(f'??? note "Imported by {count} of tests"\n\n    {files}.')
    parts += ["## Source", CODE_PLACE]
    return "\n\n".join(filter(None, parts)) + "\n"


def format_code(path: str, text: str) -> str:
    """The text as HTML, highlighted; line 12 has the anchor `L12`."""
    try:
        lexer = get_lexer_for_filename(path, stripnl=False)
    except ClassNotFound:
        lexer = TextLexer(stripnl=False)
    lines = highlight(text, lexer, HtmlFormatter(nowrap=True)).removesuffix("\n").split("\n")
    width = len(str(len(lines)))
    numbered = (
        f'<span id="L{number}"><a href="#L{number}" data-linenos="{number:{width}} "></a>'
        f"{line}</span>"
        for number, line in enumerate(lines, start=1)
    )
    code = "\n".join(numbered)
    return f'<div class="highlight source"><pre><code>{code}</code></pre></div>'


def code_anchors(text: str) -> set[str]:
    """The anchors that `format_code` makes."""
    return {f"L{number}" for number in range(1, max(1, text.count("\n")) + 1)}


def format_folder(project: Project, folder: str) -> str:
    """The page of a folder: what it is for, and what is in it."""
    page = folder_uri(folder)
    init = project.files.get(f"{folder}/__init__.py")
    title = init.title if init else folder or "Source"
    parts = [f"{_HEAD}# {escape(title)}", to_markdown(init.purpose) if init else _about(folder)]
    if folder == PACKAGE:
        parts += list(_layers(project, page))
    elif layer := _layer_of(project, folder):
        parts.append(_layer_text(project, layer))
    rows = [
        f"| {_entry_link(project, entry, page)} | {first_paragraph(_purpose(project, entry))} |"
        for entry in _folders_first(project, folder)
        if not (folder == PACKAGE and _layer_of(project, entry))  # Those are in a table already.
    ]
    parts.append("\n".join(["| | |", "|---|---|", *rows]))
    return "\n\n".join(filter(None, parts)) + "\n"


def _place(project: Project, file: SourceFile) -> str:
    folder = posixpath.dirname(file.path)
    init = project.files.get(f"{folder}/__init__.py")
    where = init.title if init else folder or "the root"
    count = file.text.count("\n")
    return (
        f"`{file.path}`, {count} {'line' if count == 1 else 'lines'}, "
        f"in {link(escape(where), folder_uri(folder), file_uri(file.path))}."
    )


def _name_rows(project: Project, file: SourceFile) -> Iterator[str]:
    yield "| Name | Kind | Line | |"
    yield "|---|---|--:|---|"
    page = file_uri(file.path)
    for name in file.names:
        shown = link(f"`{name.name}`", page, page, line=name.line)
        line = link(str(name.line), page, page, line=name.line)
        what = first_paragraph(name.summary)
        if public := project.public_paths.get((file.path, name.name)):
            what += f" API: [`{public}`][{public}]."
        yield f"| {shown} | {name.kind} | {line} | {what.lstrip()} |"


def _import_items(project: Project, path: str) -> Iterator[str]:
    page = file_uri(path)
    for other, names in project.imports[path].items():
        links = ", ".join(_name_link(project, other, name, page) for name in names)
        yield f"- {_file_link(project, other, page)}" + (f": {links}" if links else "")


def _name_link(project: Project, path: str, name: str, page: str) -> str:
    place = project.find(f"{project.files[path].module}.{name}")
    if place is None:  # It has a leading underscore.
        return f"`{name}`"
    return link(f"`{name}`", file_uri(place.file.path), page, line=place.name.line)


def _file_link(project: Project, path: str, page: str) -> str:
    return link(escape(project.files[path].title), file_uri(path), page)


def _entry_link(project: Project, entry: str, page: str) -> str:
    name = posixpath.basename(entry)
    if entry in project.folders:
        return link(f"`{name}/`", folder_uri(entry), page)
    uri = copied_uri(entry) if entry in project.copied else file_uri(entry)
    return link(f"`{name}`", uri, page)


def _purpose(project: Project, entry: str) -> str:
    if entry in _PURPOSES:
        return _PURPOSES[entry]
    init = project.files.get(f"{entry}/__init__.py")
    file = init or project.files.get(entry) or project.files.get(f"{entry}/README.md")
    return file.purpose if file else ""


def _folders_first(project: Project, folder: str) -> Iterable[str]:
    return sorted(project.folders[folder], key=lambda entry: (entry not in project.folders, entry))


def _about(folder: str) -> str:
    if folder:
        return _PURPOSES.get(folder, "")
    return (
        "Every source file has a page here, made from the file itself when the site is built: "
        "what it is for, what it defines, what it imports and who imports it, and its text.\n"
        "[All names](names.md) lists what they define from A to Z."
    )


def _layers(project: Project, page: str) -> Iterator[str]:
    yield (
        "The folders are layers: a module imports only from its own and from those above it in "
        "this table.\nThose without torch never import it."
    )
    rows = ["| Layer | Torch | |", "|---|---|---|"]
    for layer in project.layers:
        for entry in (f"{PACKAGE}/{layer}", f"{PACKAGE}/{layer}.py"):
            if entry in project.folders or entry in project.files:
                torch = "" if layer in project.layers_without_torch else "yes"
                what = first_paragraph(_purpose(project, entry))
                rows.append(f"| {_entry_link(project, entry, page)} | {torch} | {what} |")
    yield "\n".join(rows)


def _layer_of(project: Project, path: str) -> str:
    if not path.startswith(f"{PACKAGE}/"):
        return ""
    name = path.removeprefix(f"{PACKAGE}/").split("/")[0].removesuffix(".py")
    return name if name in project.layers else ""


def _layer_text(project: Project, layer: str) -> str:
    before = project.layers[: project.layers.index(layer)]
    torch = " It never imports torch." if layer in project.layers_without_torch else ""
    if not before:
        return f"It imports from no other layer.{torch}"
    return f"It may import from {', '.join(f'`{name}`' for name in before)}.{torch}"
