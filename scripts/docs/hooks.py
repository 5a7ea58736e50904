"""What mkdocs calls while it builds the site: adds the pages made from source, and leads links."""

from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from mkdocs.utils import get_relative_url

from api_links import add_source_links
from site_navigation import navigation
from source_pages import CODE_PLACE, code_anchors, file_uri, format_code
from source_site import SourceSite


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Reads the project, and gives its pages their places in the navigation."""
    site = SourceSite(Path(config.config_file_path).parent)
    config.extra["source_site"] = site
    config.nav = [*(config.nav or []), {"Source": navigation(site.project)}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages made from source, and the files that documents link to."""
    site = _site(config)
    for uri, text in site.pages().items():
        files.append(File.generated(config, uri, content=text))
    for uri, path in site.copies().items():
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Leads the links of a document in docs/; those of the pages made from source are right."""
    if page.file.generated_by:
        return markdown
    uri = page.file.src_uri
    return _site(config).lead(markdown, document=f"docs/{uri}", page=uri)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files, **_: Any) -> str:
    """Gives each name of the API a link to its source; tells mkdocs the anchors of code."""
    site = _site(config)
    if code := site.file_at(page.file.src_uri):
        page.present_anchor_ids = (page.present_anchor_ids or set()) | code_anchors(code.text)

    def address_of(path: str) -> str | None:
        place = site.project.places.get(path)
        file = files.get_file_from_path(file_uri(place.file.path)) if place else None
        if place is None or file is None:
            return None
        return f"{get_relative_url(file.url, page.url)}#L{place.name.line}"

    return add_source_links(html, address_of)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Puts the text of a file on its page."""
    code = _site(config).file_at(page.file.src_uri)
    return output.replace(CODE_PLACE, format_code(code.path, code.text)) if code else output


def _site(config: MkDocsConfig) -> SourceSite:
    site: SourceSite = config.extra["source_site"]
    return site
