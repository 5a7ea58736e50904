"""The navigation of the pages made from source: folders, as they are in the repository."""

import posixpath
from typing import Any

from name_index import PAGE as NAMES_PAGE
from project_files import Project
from source_pages import PACKAGE, file_uri, folder_uri


def navigation(project: Project) -> list[Any]:
    """What mkdocs calls a nav: a list of pages, and of sections that are such lists too."""
    first = [folder_uri(""), {"All names": NAMES_PAGE}, {"penstock": _folder(project, PACKAGE)}]
    rest = _folder(project, "")[1:]
    return first + [entry for entry in rest if "penstock" not in entry]


def _folder(project: Project, folder: str) -> list[Any]:
    entries = project.folders[folder]
    folders = [entry for entry in entries if entry in project.folders]
    files = [entry for entry in entries if entry in project.files]
    return [
        folder_uri(folder),
        *({posixpath.basename(inner): _folder(project, inner)} for inner in folders),
        *({_file_title(file): file_uri(file)} for file in files),
    ]


def _file_title(path: str) -> str:
    return posixpath.basename(path).removesuffix(".py")
