"""Do the links of a built site lead anywhere? Pages, anchors, pictures, scripts; of other sites' addresses the form.

MkDocs complains of what it renders itself, but not of HTML that comes from a docstring, a notebook or a theme. This
reads the pages as they are served. It opens no connection.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_ATTRIBUTES = {("a", "href"), ("link", "href"), ("img", "src"), ("script", "src"), ("source", "src"), ("iframe", "src")}


class _Page(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" or (tag, name) == ("a", "name"):
                self.anchors.add(value or "")
            elif (tag, name) in _ATTRIBUTES:
                self.links.add(value or "")


def problems(site: Path) -> list[str]:
    """Each link that leads nowhere, as `page: link: reason`. A site without links is itself a problem."""
    site = site.resolve()

    @cache
    def page(path: Path) -> _Page:
        return _Page(path.read_text(encoding="utf-8"))

    found, count = [], 0
    for path in sorted(site.rglob("*.html")):
        for link in sorted(page(path).links):
            count += 1
            if reason := _reason(site, path, link, page):
                found.append(f"{path.relative_to(site)}: {link!r}: {reason}")
    return found if count else [f"{site}: no page with a link"]


def _reason(site: Path, path: Path, link: str, page: Callable[[Path], _Page]) -> str | None:
    try:
        url = urlsplit(link)
    except ValueError as error:
        return str(error)
    if url.scheme in ("http", "https"):
        return None if re.fullmatch(r"[\w-]+(\.[\w-]+)+(:\d+)?", url.netloc) and " " not in link else "no address"
    if url.scheme in ("data", "mailto"):
        return None
    if url.scheme or url.netloc or not link:
        return "neither a path nor an https address"
    base = site if url.path.startswith("/") else path.parent
    target = (base / unquote(url.path).lstrip("/")).resolve() if url.path else path
    if target.is_dir():
        target /= "index.html"
    if not target.is_relative_to(site) or not target.is_file():
        return "no such file"
    if url.fragment and target.suffix == ".html" and unquote(url.fragment) not in page(target).anchors:
        return "no such anchor"
    return None
