"""The page that lists all names from A to Z, with where each is defined."""

from collections.abc import Iterator

from docstrings import escape
from project_files import Place, Project
from source_pages import file_uri, link

PAGE = "source/names.md"


def format_name_index(project: Project) -> str:
    """The index: classes, functions, methods and constants, by the last part of their name."""
    places = sorted(_places(project), key=_sort_key)
    lines = [
        "---\nsearch:\n  exclude: true\n---\n\n# All names",
        "",
        f"The {len(places)} classes, functions, methods, properties and constants of the package "
        "and its examples that have no leading underscore.",
        "Each leads to its line; a name that is public also leads to its place in the API.",
    ]
    letter = ""
    for place in places:
        if _last_part(place)[0].upper() != letter:
            letter = _last_part(place)[0].upper()
            lines += ["", f"## {letter}", ""]
        lines.append(_item(project, place))
    return "\n".join(lines) + "\n"


def _places(project: Project) -> Iterator[Place]:
    for file in project.files.values():
        if file.path.startswith(("src/", "examples/")):
            yield from (Place(file, name) for name in file.names)


def _last_part(place: Place) -> str:
    return place.name.name.rpartition(".")[2]


def _sort_key(place: Place) -> tuple[str, str, str]:
    return _last_part(place).lower(), place.file.path, place.name.name


def _item(project: Project, place: Place) -> str:
    file, name = place.file, place.name
    shown = _last_part(place)
    owner = name.name.removesuffix(shown).removesuffix(".")
    where = f"{file.title}.{owner}" if owner else file.title
    target = link(f"`{shown}`", file_uri(file.path), PAGE, line=name.line)
    public = project.public_paths.get((file.path, name.name))
    api = f" · [API][{public}]" if public else ""
    return f"- {target} {name.kind} · {escape(where)}{api}"
