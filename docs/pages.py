"""The pages of the site: the repository's files where they lie in it, so that a link that works there works here.

A hook of MkDocs. Nothing is listed: notebooks, ops, modules and commands are found, and a file that a page links to
becomes a page too.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import importlib
import io
import json
import os
import pkgutil
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import links
from docstrings import link_ops
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from pygments.lexers import get_lexer_for_filename
from pygments.util import ClassNotFound

import mxspec
from mxspec import __main__ as command_line
from mxspec import dispatch

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\]\(([^)\s#]+)")
_FENCE = "`" * 8  # longer than any in what it encloses
_UNSEARCHED = "---\nsearch: {exclude: true}\n---\n"


class Converted(File):
    """A page made from a file that is no Markdown; its address is the file's and `.html`."""

    def is_documentation_page(self) -> bool:
        return True


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)  # they come under their paths in the repository

    notebooks = _found("notebooks/*.ipynb")
    ops = {f"ops/{op}.md": _op_page(op, notebooks) for op in dispatch.ops()}
    modules = {f"python/{name}.md": _module_page(name) for name in _modules()}
    generated = {**ops, **modules, "command_line.md": _command_line_page()}
    figures = _found("docs/*.md") + _found("benchmarks/results/*.md")
    config.nav = [
        "README.md",
        {"Notebooks": notebooks},
        {"Ops": list(ops)},
        {"Python": list(modules)},
        {"Command line": "command_line.md"},
        {"Figures": figures},
        {"Contributing": "CONTRIBUTING.md"},
    ]

    for uri, text in generated.items():
        files.append(File.generated(config, uri, content=text))
    in_nav = ["README.md", *notebooks, *figures, "CONTRIBUTING.md"]
    waiting = [*in_nav, *_found("docs/*.css")]
    for uri, text in generated.items():
        waiting += _linked_files(uri, text)
    while waiting:
        uri = waiting.pop()
        if uri in files:
            continue
        for file in _files_of(uri, config):
            file.inclusion = InclusionLevel.INCLUDED if uri in in_nav else InclusionLevel.NOT_IN_NAV
            files.append(file)
            if file.is_documentation_page():
                waiting += _linked_files(uri, file.content_string)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.parent is None:
        page.meta["hide"] = ["navigation"]  # which would hold this page alone
    return link_ops(markdown)


def on_post_build(*, config: MkDocsConfig) -> None:
    found = links.problems(Path(config.site_dir))
    if found:
        raise PluginError("\n".join(["links that lead nowhere:", *found]))


def _found(pattern: str) -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern))


def _linked_files(uri: str, markdown: str) -> Iterator[str]:
    """The files of the repository that a page links to. One that does not exist is left for MkDocs to complain of."""
    for target in _LINK.findall(markdown):
        path = posixpath.normpath(posixpath.join(posixpath.dirname(uri), target))
        if not path.startswith("..") and (ROOT / path).is_file():
            yield path


def _files_of(uri: str, config: MkDocsConfig) -> Iterator[File]:
    """What a file of the repository is on the site: a page, with its pictures, or the file itself."""
    path = ROOT / uri
    if path.suffix == ".ipynb":
        text, pictures = _notebook_page(json.loads(path.read_text(encoding="utf-8")), path.stem)
        for name, content in pictures.items():
            yield File.generated(config, posixpath.join(posixpath.dirname(uri), name), content=content)
    elif path.suffix in (".md", ".png", ".css", ".json"):
        text = path.read_text(encoding="utf-8") if path.suffix == ".md" else ""
        if len(text) < 100_000:
            yield File(uri, str(ROOT), config.site_dir, config.use_directory_urls)
        else:  # the tables of a complete run would drown whatever one searches for
            yield File.generated(config, uri, content=_UNSEARCHED + text)
        return
    else:
        text = _source_page(uri, path.read_text(encoding="utf-8"))
    page = Converted.generated(config, uri, content=text)
    page.dest_uri = f"{uri}.html"
    yield page


def _source_page(uri: str, source: str) -> str:
    try:
        language = get_lexer_for_filename(uri).aliases[0]
    except ClassNotFound:
        language = "text"
    parts = [f"{_UNSEARCHED}# `{uri}`", f"{_FENCE}{language}\n{source}\n{_FENCE}"]
    if uses := _imported_files(source) if language == "python" else []:
        parts.insert(1, "It uses " + ", ".join(f"[`{path}`]({_relative(path, uri)})" for path in uses) + ".")
    return "\n\n".join(parts) + "\n"


def _imported_files(source: str) -> list[str]:
    """The files of this repository that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = node.module.replace(".", "/")
            found |= {f"{module}.py", *(f"{module}/{name.name}.py" for name in node.names)}
    return sorted(path for path in found if (ROOT / path).is_file())


def _relative(path: str, page: str) -> str:
    return posixpath.relpath(path, posixpath.dirname(page))


def _notebook_page(notebook: dict[str, Any], name: str) -> tuple[str, dict[str, bytes]]:
    """A notebook's cells and stored outputs as Markdown, and its pictures by their file names."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"{_FENCE}python\n{source}\n{_FENCE}")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                file = f"{name}_{len(pictures) + 1}.png"
                pictures[file] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![What this cell draws]({file})")
                continue
            text = output.get("text", data.get("text/plain"))
            if text is None:
                raise PluginError(
                    f"{name}: an output of {', '.join(data) or output['output_type']}; needs text or a PNG"
                )
            parts.append(f"{_FENCE} {{ .text .output }}\n{''.join(text).rstrip()}\n{_FENCE}")
    return "\n\n".join(parts) + "\n", pictures


def _op_page(op: str, notebooks: list[str]) -> str:
    """The contract, by mkdocstrings from the reference's docstring; then the sources, and who uses it."""
    lines = ["---", f"title: {op}", "---", f"::: mxspec.{op}", "    options: {heading_level: 1}", "", "## Sources", ""]
    for backend in dispatch.backends():
        folder = "reference" if backend == "reference" else f"{backend}_kernels"
        if backend == "reference" or dispatch.has_kernel(op, backend):
            path = f"mxspec/{folder}/{op}.py"
            lines.append(f"- {backend}: [{path}](../{path})")
    if peers := [peer for peer in _peers() if hasattr(importlib.import_module(f"mxspec.rules.{peer}"), op)]:
        lines += ["", "## Peers' rules", ""]
        lines += [f"- [rules.{peer}.{op}][mxspec.rules.{peer}.{op}]" for peer in peers]
    call = re.compile(rf"\b{op}\(")
    if uses := [path for path in notebooks if call.search((ROOT / path).read_text(encoding="utf-8"))]:
        lines += ["", "## Notebooks that use it", ""]
        lines += [f"- [{_title(path)}](../{path})" for path in uses]
    return "\n".join(lines) + "\n"


def _title(notebook: str) -> str:
    cells = json.loads((ROOT / notebook).read_text(encoding="utf-8"))["cells"]
    return "".join(cells[0]["source"]).splitlines()[0].removeprefix("# ")


def _peers() -> list[str]:
    return [name.removeprefix("rules.") for name in _submodules("mxspec.rules")] if "rules" in _modules() else []


def _modules() -> list[str]:
    """The public modules of mxspec but the ops, which have pages of their own."""
    names = (module.name for module in pkgutil.iter_modules(mxspec.__path__))
    return [name for name in names if not name.startswith("_") and not name.endswith(("reference", "_kernels"))]


def _submodules(package: str) -> list[str]:
    """The public files of a package that are not spoken for by its own `__all__`."""
    module = importlib.import_module(package)
    told = {getattr(getattr(module, name), "__module__", "") for name in getattr(module, "__all__", ())}
    names = (m.name for m in pkgutil.iter_modules(getattr(module, "__path__", [])))
    return [name for name in names if not name.startswith("_") and f"{package}.{name}" not in told]


def _module_page(name: str) -> str:
    lines = ["---", f"title: mxspec.{name}", "---"]
    for level, module in [(1, name), *((2, f"{name}.{sub}") for sub in _submodules(f"mxspec.{name}"))]:
        options = f"{{heading_level: {level}, show_root_full_path: true, show_source: false}}"
        lines += [f"::: mxspec.{module}", f"    options: {options}", ""]
    return "\n".join(lines)


def _command_line_page() -> str:
    """What `--help` says, of the whole and of each command."""
    root = _help([])
    names = re.search(r"\{([\w,]+)\}", root)
    if names is None:
        raise PluginError(f"python -m mxspec --help names no commands:\n{root}")
    parts = ["# Command line", "`OP` is the name of an op.", f"{_FENCE}text\n{root}\n{_FENCE}"]
    for name in names[1].split(","):
        parts += [f"## {name}", f"{_FENCE}text\n{_help([name])}\n{_FENCE}"]
    return "\n\n".join(parts) + "\n"


def _help(command: list[str]) -> str:
    os.environ |= {"COLUMNS": "100", "NO_COLOR": "1"}
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        command_line.main([*command, "--help"])
    return out.getvalue().rstrip().replace(f"{{{','.join(dispatch.ops())}}}", "OP")
