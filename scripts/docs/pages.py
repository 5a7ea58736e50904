"""Write the pages of the site that come from files of the repository; mkdocs-gen-files runs this.

The folder `source/` of the site mirrors the repository: the page of `examples/train.py` is
`source/examples/train.py.md`. The page of a folder is its `__init__.py` or README.md, if any.
"""

import ast
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

import griffe
import mkdocs_gen_files
from mkdocs.structure.files import InclusionLevel

ROOT = Path(mkdocs_gen_files.config.config_file_path).parent
TOP = PurePosixPath(".")
SOURCE = ("*.md", "src/**/*", "examples/*", "benchmarks/**/*")
DOCUMENTS = ("*.md", "docs/**/*.md", "benchmarks/**/*.md")
FOLDER_PAGES = {"__init__.py", "README.md"}
# A link in Markdown or HTML: its text, if that is the name of a document, and its relative path.
LINK = re.compile(r'(\[[\w/.]+\.md)?(\]\(|\b(?:src|srcset|href)=")([^/()\s"#:][^()\s"#:]*)')

Tree = dict[PurePosixPath, list[PurePosixPath]]


def read(path: PurePosixPath) -> str:
    """Return the text of a file of the repository."""
    return (ROOT / path).read_text(encoding="utf-8")


def find(*patterns: str) -> set[PurePosixPath]:
    """Return the files of the repository that match a pattern, without those that are empty."""
    found = {file for pattern in patterns for file in ROOT.glob(pattern) if file.is_file()}
    shown = {file for file in found if file.stat().st_size and file.suffix != ".pyc"}
    return {PurePosixPath(file.relative_to(ROOT).as_posix()) for file in shown}


def make_tree(files: set[PurePosixPath]) -> Tree:
    """Return what is in each folder, in the order of the navigation: folders, then files."""
    tree: dict[PurePosixPath, set[PurePosixPath]] = {}
    for file in files:
        path = file.parent if file.name in FOLDER_PAGES else file
        while path != TOP:
            # The package is at the top, because src/ holds nothing else.
            folder = TOP if path.parent.name == "src" else path.parent
            tree.setdefault(folder, set()).add(path)
            path = folder
    return {
        folder: sorted(entries, key=lambda e: (e not in tree, not e.is_relative_to("src"), e))
        for folder, entries in tree.items()
    }


def page_of(path: PurePosixPath) -> PurePosixPath:
    """Return where the site shows a file or folder of the repository."""
    if path.is_relative_to("docs"):
        return path.relative_to("docs")
    if (ROOT / path).is_dir():
        return "source" / path / "index.md"
    if path.name in FOLDER_PAGES:
        return "source" / path.with_name("index.md")
    return "source" / (path if path.suffix == ".md" else path.with_name(f"{path.name}.md"))


def write(page: PurePosixPath | str, text: str) -> None:
    """Add a page to the site, in place of the one in docs/ if there is one."""
    with mkdocs_gen_files.open(page, "w") as file:
        file.write(text)


def resolve(link: str, document: PurePosixPath) -> PurePosixPath:
    """Return the path in the repository that a link in a document leads to."""
    return PurePosixPath(normpath(document.parent / link))


def find_linked(document: PurePosixPath) -> set[PurePosixPath]:
    """Return the files that a document links to, and those in folders that it links to."""
    links = [resolve(path, document) for _, _, path in LINK.findall(read(document))]
    return find(*map(str, links), *(f"{path}/*" for path in links))


def title_of(document: PurePosixPath) -> str:
    """Return the first heading of a document, or its file name if it has none."""
    heading = re.search(r"^# (.+)$", read(document), re.MULTILINE)
    return heading[1] if heading else document.name


def format_document(document: PurePosixPath) -> str:
    """Return a document whose links lead to pages, and show titles instead of file names."""

    def redirect(link: re.Match[str]) -> str:
        file_name, opening, path = link.groups()
        target = resolve(path, document)
        if not (ROOT / target).exists():  # A URL, or a mistake that mkdocs will report.
            return link[0]
        text = f"[{title_of(target)}" if file_name else ""
        return text + opening + relpath(page_of(target), page_of(document).parent)

    return LINK.sub(redirect, read(document))


def format_source(path: PurePosixPath, title: str, api: str = "") -> str:
    """Return the page of a source file. Search ranks it below guides, and ignores the code."""
    return f"""---
search:
  boost: 0.5
---

# {title}

{api}

## Source {{ data-search-exclude }}

~~~~~~ {{ .{path.suffix[1:] or "text"} #code linenums="1" title="{path}" }}
{read(path)}
~~~~~~
"""


def format_api(module: griffe.Module) -> str:
    """Return the directive that has mkdocstrings document what a module itself defines."""
    members = [name.name for name in find_names(module) if name.parent is module]
    return f"""
::: {module.path}
    options:
      extra: {{source_pages: ""}}  # The source is on the same page.
      heading_level: 2
      members: {members}
      show_root_heading: false
      show_root_toc_entry: false
      skip_local_inventory: true  # Links to a name lead to the API pages.
"""


def format_list(folder: PurePosixPath, tree: Tree) -> str:
    """Return a list of what is in a folder."""
    return "\n".join(
        f"- [`{entry.name}`]({relpath(page_of(entry), page_of(folder).parent)}) {summary(entry)}"
        for entry in tree.get(folder, ())
    )


def summary(path: PurePosixPath) -> str:
    """Return the first line of the docstring of a Python file or package, if there is one."""
    file = path / "__init__.py" if (ROOT / path / "__init__.py").exists() else path
    docstring = ast.get_docstring(ast.parse(read(file))) if file.suffix == ".py" else None
    return (docstring or "").partition("\n")[0]


def format_nav(folder: PurePosixPath, tree: Tree, indent: str = "") -> Iterator[str]:
    """Yield the navigation below a folder, as lines for mkdocs-literate-nav."""
    for entry in tree.get(folder, ()):
        page = page_of(entry).relative_to("source")
        yield f"{indent}- [`{entry.name.removesuffix('.py')}`]({page})"
        yield from format_nav(entry, tree, f"{indent}    ")


def find_modules(module: griffe.Module) -> Iterator[griffe.Module]:
    """Yield a module and all modules below it."""
    yield module
    for member in module.members.values():
        if not member.is_alias and member.is_module:
            yield from find_modules(member)


def find_names(scope: griffe.Module | griffe.Class) -> Iterator[griffe.Object]:
    """Yield the public names that a module or class defines, and those of its classes."""
    for name, member in scope.members.items():
        if not (member.is_alias or member.is_module or name.startswith("_")):
            yield member
            if member.is_class:
                yield from find_names(member)


def file_of(name: griffe.Object) -> PurePosixPath:
    """Return the file that defines a name, or the file of a module."""
    return PurePosixPath(name.filepath.relative_to(ROOT).as_posix())


def find_api(package: griffe.Module) -> dict[str, str]:
    """Return the names that the API pages document, by the paths where they are defined."""
    pages = "\n".join(map(read, find("docs/api/*.md")))
    shown = re.findall(rf"^::: ({package.name}\.(\S+))", pages, re.MULTILINE)
    return {package[path].canonical_path: name for name, path in shown}


def format_index(names: list[griffe.Object], api: dict[str, str]) -> str:
    """Return the page that lists names from A to Z."""
    text = f"""---
search:
  exclude: true
---

# All names

The {len(names)} classes, functions, methods and attributes without a leading underscore.
Each name links to the page of its file; the names users can rely on also link to the API.
"""
    ordered = sorted(names, key=lambda name: (name.name.lower(), name.path))
    for letter, group in groupby(ordered, key=lambda name: name.name[0].upper()):
        text += f"\n## {letter}\n\n"
        for name in group:
            link = f"{page_of(file_of(name)).relative_to('source')}#{name.path}"
            text += f"- [`{name.name}`]({link}) {name.kind.value} in {name.parent.path}"
            text += f", [API][{api[name.path]}]\n" if name.path in api else "\n"
    return text


def main() -> None:
    """Write all pages, and the navigation."""
    documents = find(*DOCUMENTS)
    files = find(*SOURCE).union(*map(find_linked, documents)) - find("docs/**/*")
    tree = make_tree(files)
    package = griffe.load("penstock", search_paths=[ROOT / "src"])
    modules = {file_of(module): module for module in find_modules(package)}

    for folder in tree:  # Below, `__init__.py` or README.md takes the place of this.
        write(page_of(folder), f"# {folder}\n\n{format_list(folder, tree)}\n")
    for path in sorted(files | documents):
        if path.suffix == ".md":
            text = format_document(path)
        elif path in modules:
            module = modules[path]
            inside = format_list(path.parent, tree) if module.is_init_module else ""
            text = format_source(path, module.path, format_api(module) + inside)
        else:
            text = format_source(path, str(path))
        write(page_of(path), text)
    names = [name for module in modules.values() for name in find_names(module)]
    write("source/names.md", format_index(names, find_api(package)))

    lines = ["- [README](index.md)", "- [All names](names.md)", *format_nav(TOP, tree)]
    write("source/SUMMARY.md", "\n".join(lines))
    nav_file = mkdocs_gen_files.files.get_file_from_path("source/SUMMARY.md")
    nav_file.inclusion = InclusionLevel.EXCLUDED  # It is not a page.


main()
