"""All pages made from source, and where the site has what the repository has."""

from pathlib import Path

from name_index import PAGE as NAMES_PAGE
from name_index import format_name_index
from project_files import Project, read_project
from repository_links import lead_links, name_links
from source_files import SourceFile
from source_pages import copied_uri, file_uri, folder_uri, format_file, format_folder


class SourceSite:
    """The pages of one build, from the repository as it was when the build began."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.project: Project = read_project(root)

    def page_of(self, path: str) -> str | None:
        """Where the site has a path of the repository; None if it has not."""
        if path.startswith("docs/") and (self.root / path).is_file():
            return path.removeprefix("docs/")
        if path in self.project.files:
            return file_uri(path)
        if path in self.project.folders:
            return folder_uri(path)
        return copied_uri(path) if path in self.project.copied else None

    def pages(self) -> dict[str, str]:
        """The text of each page, by where it is."""
        project = self.project
        pages = {file_uri(path): self._make_page(path) for path in project.files}
        pages |= {folder_uri(path): format_folder(project, path) for path in project.folders}
        return pages | {NAMES_PAGE: format_name_index(project)}

    def file_at(self, uri: str) -> SourceFile | None:
        """The file whose text is to be shown on a page."""
        file = self.project.files.get(uri.removeprefix("source/").removesuffix(".md"))
        return file if file and uri == file_uri(file.path) and not _is_document(file.path) else None

    def copies(self) -> dict[str, Path]:
        """The files that the site has as they are, by where they are."""
        return {copied_uri(path): self.root / path for path in sorted(self.project.copied)}

    def lead(self, text: str, *, document: str, page: str) -> str:
        """Leads the links of a document of the repository to pages of the site."""
        named = name_links(text, document=document, title_of=self.title_of)
        return lead_links(named, document=document, page=page, page_of=self.page_of)

    def title_of(self, document: str) -> str:
        """The title of a document of the repository, or its name if it has none."""
        path = self.root / document
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        titles = (line.removeprefix("# ") for line in text.splitlines() if line.startswith("# "))
        return next(titles, path.name)

    def _make_page(self, path: str) -> str:
        """A document is a page already, but for its links."""
        if _is_document(path):
            return self.lead(self.project.files[path].text, document=path, page=file_uri(path))
        return format_file(self.project, path)


def _is_document(path: str) -> bool:
    return path.endswith(".md")
