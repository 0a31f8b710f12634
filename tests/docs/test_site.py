"""The site: a dead link fails its build, every public name has a page, and every link of the built pages leads on."""

import importlib
import os
import pkgutil
import re
import subprocess
import sys
import zlib
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import mxspec
from mxspec import dispatch, layouts, rules
from tests.helpers import ROOT

pytest.importorskip("sphinx", reason="needs the extra `docs`")
SITE = Path(os.environ.get("MXSPEC_SITE", "no site"))
of_the_site = pytest.mark.skipif("MXSPEC_SITE" not in os.environ, reason="`make docs` runs it on the pages it built")


def build(folder, **pages):
    """Build pages of Markdown with the site's configuration, but without its own extension. Returns what was said."""
    for name, text in pages.items():
        (folder / f"{name}.md").write_text(text)
    options = ["-q", "-W", "--keep-going", "-c", ROOT / "docs", "-D", "extensions=myst_nb"]
    command = [sys.executable, "-m", "sphinx", "-b", "dummy", *options, folder, folder / "out"]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)


def test_a_dead_link_fails_the_build(tmp_path):
    pytest.importorskip("sphinx")
    good = "# Home\n\n[there](OTHER.md), [below](OTHER.md#a-part), [here](#home), [Python](https://www.python.org)\n"
    other = "---\norphan: true\n---\n# Other\n\n## A part\n"
    ran = build(tmp_path, README=good, OTHER=other)
    assert (ran.returncode, ran.stderr) == (0, "")
    dead = ["GONE.md", "OTHER.md#gone", "#gone", "gone.py"]
    ran = build(
        tmp_path, README=good + "".join(f"\n[dead]({link})\n" for link in dead) + "\n![](gone.png)\n", OTHER=other
    )
    assert ran.returncode == 1
    for link in [*dead, "gone.png"]:
        assert link.rpartition("#")[2] in ran.stderr


DOCSTRING = """Move bytes.

Args:
    scale: a tensor.

Shapes:
    x: `(M, K)`, any
        strides.
    Returns `(M,)`.

Special values: NaN stays;
    so does Inf: a colon is no type.

Source: OCP MX v1.0."""


def test_a_docstring_as_napoleon_reads_it():
    pytest.importorskip("sphinx")
    own = importlib.import_module("docs.pages")
    lines = DOCSTRING.split("\n")
    own.read_docstring(None, "function", "", None, None, lines)
    assert lines[5:] == [
        "Shapes:", "    * x: `(M, K)`, any", "      strides.", "    * Returns `(M,)`.", "",
        "Special values:", "    NaN stays;", "    so does Inf: a colon is no type.", "", "Source:", "    OCP MX v1.0.",
    ]  # fmt: skip
    lines = ["dict() -> new empty dictionary"]
    own.read_docstring(None, "data", "", mxspec.nn.RECIPES, None, lines)
    assert lines == [""]


def test_every_op_is_on_one_page_of_ops():
    own = importlib.import_module("docs.pages")
    jinja = own.Environment(loader=own.FileSystemLoader(ROOT / "docs/templates"), undefined=own.StrictUndefined)
    listed = re.findall(r"^   (\w+)$", (ROOT / "docs/templates/ops.rst").read_text(), re.MULTILINE)
    assert len(listed) > 4
    texts = [jinja.get_template(f"{page}.rst").render(page=page, **vars(own)) for page in listed]
    found = [op for text in texts for op in re.findall(r"~mxspec\.(\w+)$", text, re.MULTILINE)]
    assert sorted(op for op in found if op in dispatch.ops()) == sorted(dispatch.ops())


class Page(HTMLParser):
    """The anchors of a page, its links, its pictures without a text, and its tables outside a box that scrolls."""

    def __init__(self, path):
        super().__init__()
        self.anchors, self.links, self.untold, self.loose, self.divs = set(), set(), [], 0, []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        said = dict(attrs)
        self.anchors |= {said["id"]} if said.get("id") else set()
        self.links |= {said[name] for name in ("href", "src") if said.get(name)}
        self.untold += [said.get("src")] if tag == "img" and not said.get("alt") else []
        if tag == "div":
            self.divs.append("scroll" in said.get("class", "") or "picture" in said.get("class", ""))
        self.loose += tag == "table" and "indextable" not in said.get("class", "") and not any(self.divs)

    def handle_endtag(self, tag):
        if tag == "div":
            self.divs.pop()


page = cache(Page)


def pages():
    return [path for path in sorted(SITE.rglob("*.html")) if "_static" not in path.parts]


def dead(path, link):
    """Why a link leads nowhere; of another site's address only the form is judged."""
    url = urlsplit(link)
    if url.scheme in ("http", "https", "data", "mailto"):
        return None if url.netloc or url.scheme in ("data", "mailto") else "no address"
    target = (path.parent / unquote(url.path)).resolve() if url.path else path
    if url.scheme or link.startswith("/") or not target.is_relative_to(SITE) or not target.is_file():
        return "no such file"
    fragment = unquote(url.fragment) if target.suffix == ".html" else ""
    return None if fragment in ("", "top") or fragment in page(target).anchors else "no such anchor"


@of_the_site
def test_every_link_of_the_pages_leads_on():
    assert SITE / "index.html" in pages()
    assert len(pages()) > 300
    found = [
        f"{p.relative_to(SITE)}: {link}: {why}" for p in pages() for link in page(p).links if (why := dead(p, link))
    ]
    assert found == []


@of_the_site
def test_tables_scroll_and_pictures_have_a_text():
    for path in pages():
        assert (path, page(path).loose, page(path).untold) == (path, 0, [])


def modules():
    found = [
        importlib.import_module(f"mxspec.{m.name}") for m in pkgutil.iter_modules(mxspec.__path__) if m.name[0] != "_"
    ]
    return [mxspec, *(module for module in found if hasattr(module, "__all__"))]


@of_the_site
def test_every_public_name_has_a_page():
    inventory = (SITE / "objects.inv").read_bytes().split(b"\n", 4)[4]
    entries = [line.split() for line in zlib.decompress(inventory).decode().splitlines()]
    listed = {entry[0]: entry[3].replace("$", entry[0]) for entry in entries if entry[1].startswith("py:")}
    assert {module.__name__.removeprefix("mxspec.") for module in modules()} >= {"check", "formats", "nn", "vectors"}
    for module in modules():
        for name in module.__all__:
            names = [f"{module.__name__}.{name}"] + [f"mxspec.{name}"] * (name in mxspec.__all__)
            told = [listed[full] for full in names if full in listed]
            assert told, names
            target, _, anchor = told[0].partition("#")
            assert anchor in page(SITE / target).anchors
    assert listed.keys() >= {f"mxspec.rules.{peer}" for peer in rules.peers()}


@of_the_site
def test_the_page_of_an_op_leads_to_its_sources():
    gallery = page(SITE / "docs/api/all_layouts.html")
    assert gallery.anchors >= {name.replace("_", "-") for name in layouts.LAYOUTS}
    for op in dispatch.ops():
        links = page(SITE / f"docs/api/mxspec.{op}.html").links
        folders = ["reference", "cases", *(f"{b}_kernels" for b in dispatch.backends() if dispatch.has_kernel(op, b))]
        assert links >= {f"../../mxspec/{folder}/{op}.html" for folder in folders}, op
    assert any(
        re.fullmatch(r"../../_images/blocked\d*.png", link)
        for link in page(SITE / "docs/api/mxspec.mx_gemm.html").links
    )
    commands = re.search(r"{([\w,]+)}", subprocess.run(
        [sys.executable, "-m", "mxspec", "--help"], capture_output=True, text=True, check=True
    ).stdout)  # fmt: skip
    assert page(SITE / "docs/api/command_line.html").anchors >= set(commands[1].split(","))
