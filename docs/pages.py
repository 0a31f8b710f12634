"""Pages from docs/templates, a page for each source file, links from names in prose, and docstrings for napoleon."""

import contextlib
import io
import pkgutil
import re
from pathlib import Path
from textwrap import indent

import torch  # noqa: F401 (all_layouts.rst uses it)
from docutils import nodes
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

import mxspec
from mxspec import __main__, layouts, nn

ROOT, HERE = Path(__file__).parents[1], Path(__file__).parent
SECTION = re.compile(r"^(Returns|Yields|Shapes|Special values|Raises|Example|Source): (?=.)", re.MULTILINE)
MODULES = [m.name for m in pkgutil.iter_modules(mxspec.__path__) if not re.search("__|^cases|^reference|_k", m.name)]


def files(pattern: str, text: str = "") -> list[str]:
    """The files of the repository whose text matches a regular expression, without their suffixes."""
    found = [path for path in sorted(ROOT.glob(pattern)) if re.search(text, path.read_text())]
    return [path.relative_to(ROOT).with_suffix("").as_posix() for path in found]


def help_of(*command: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        __main__.main([*command, "--help"])
    return out.getvalue()


def write_pages(app: Sphinx) -> None:
    jinja = Environment(loader=FileSystemLoader(HERE / "templates"), undefined=StrictUndefined, trim_blocks=True)
    pages = {path.stem: path.name for path in HERE.glob("templates/*.rst")}
    pages |= {f"mxspec.{name}": "each/module.rst" for name in MODULES}
    pages |= {f"{m.__name__}.{name}": "each/name.rst" for m in (mxspec, nn, layouts) for name in m.__all__}
    for page, template in pages.items():
        (HERE / f"api/{page}.rst").write_text(jinja.get_template(template).render(page=page, **globals()))


def read_source(app: Sphinx, docname: str, source: list[str]) -> None:
    """A Python file becomes a page. The pages of a folder are in the order in which its README links to them."""
    if app.env.doc2path(docname).suffix == ".py":
        source[0] = f":orphan:\n:nosearch:\n\n``{docname}.py``\n{'=' * 99}\n\n::\n\n{indent(source[0], '   ')}"
    found = re.findall(r"\]\((\w+)\.md", source[0]) + [Path(f).name for f in files(f"{Path(docname).parent}/[!R]*.md")]
    if entries := app.config.trees.get(docname) or (re.fullmatch(r"docs/\w+/README", docname) and dict.fromkeys(found)):
        source[0] += "\n\n".join(("", "```{toctree}\n:hidden:\n", *entries, "```\n"))


def link_names(app: Sphinx, doctree: nodes.document) -> None:
    for node in [n for n in doctree.findall(nodes.literal) if n.astext().removeprefix("mxspec.") in mxspec.__all__]:
        link = pending_xref("", node.deepcopy(), refdomain="py", reftype="obj", refdoc=app.env.docname)
        link["reftarget"] = f"mxspec.{node.astext().removeprefix('mxspec.')}"
        old = node.parent if node.parent.get("reftype") == "obj" else node
        if isinstance(old.parent, nodes.paragraph):
            old.replace_self(link)


def read_docstring(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """For napoleon: put each heading on its own line and make Shapes a list. Drop a docstring of a constant's type."""
    text = "" if what == "data" and obj.__doc__ == type(obj).__doc__ else SECTION.sub(r"\1:\n    ", "\n".join(lines))
    items = re.compile(r"(?<=^Shapes:\n)(    .*\n?)+", re.MULTILINE)
    text = items.sub(lambda m: re.sub(r"(?m)^    (?=\S)", "    * ", m[0]).replace(" " * 8, " " * 6), text)
    lines[:] = text.split("\n")


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_config_value("trees", {}, "env")
    app.connect("builder-inited", write_pages)
    app.connect("source-read", read_source)
    app.connect("doctree-read", link_names)
    kept = re.compile("function|method|property").search  # a class's fields are left out: its signature has them
    app.connect("autodoc-skip-member", lambda _, of, n, o, *x: (of == "class" and not kept(str(type(o)))) or None)
    app.connect("autodoc-process-docstring", read_docstring, priority=400)
    return {"parallel_read_safe": True}
