"""The pages of the site: the repository's files where they lie in it, so that a link that works there works here.

A hook of MkDocs. Nothing is listed: notebooks, ops, modules and commands are found, and a file that a page links to
comes with it.
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

import mxspec
from mxspec import __main__ as command_line
from mxspec import dispatch, rules

ROOT = Path(__file__).parents[1]
_LINK = re.compile(r"\]\(([^)\s#]+)")
_FENCE = "`" * 8  # longer than any in what it encloses


class Converted(File):
    """A page made from a file that is no Markdown; its address is the file's and `.html`."""

    def is_documentation_page(self) -> bool:
        return True


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    for file in [file for file in files if file.src_dir == config.docs_dir]:
        files.remove(file)  # they come under their paths in the repository

    notebooks = _found("notebooks/*.ipynb")
    figures = [page for page in _found("docs/*.md") if page != "docs/house.md"] + _found("benchmarks/results/*.md")
    ops = {f"ops/{op}.md": _op_page(op, notebooks) for op in dispatch.ops()}
    modules = {f"python/{name}.md": _module_page(name) for name in _modules()}
    config.nav = [
        "README.md",
        {"Notebooks": [{f"{_number(path)} {_title(path)}": path} for path in notebooks]},
        {"Ops": list(ops)},
        {"Python": list(modules)},
        {"Command line": "command_line.md"},
        {"Figures": figures},
        {"Contributing": ["CONTRIBUTING.md", "docs/house.md"]},
    ]
    in_nav = ["README.md", *notebooks, *figures, "CONTRIBUTING.md", "docs/house.md"]
    waiting = [*in_nav, *_found("docs/*.css")]
    for uri, text in {**ops, **modules, "command_line.md": _command_line_page()}.items():
        files.append(File.generated(config, uri, content=text))
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
    if page.file.src_uri.endswith(".py") or len(markdown) > 100_000:
        page.meta["search"] = {"exclude": True}  # sources, and the tables of a complete run, match everything
    return link_ops(markdown)


def on_post_build(*, config: MkDocsConfig) -> None:
    if found := links.problems(Path(config.site_dir)):
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
        text, pictures = _notebook_page(uri)
        for picture, content in pictures.items():
            yield File.generated(config, picture, content=content)
    elif path.suffix == ".py":
        text = _source_page(uri)
    else:
        yield File(uri, str(ROOT), config.site_dir, config.use_directory_urls)
        return
    page = Converted.generated(config, uri, content=text)
    page.dest_uri = f"{uri}.html"
    yield page


def _source_page(uri: str) -> str:
    source = (ROOT / uri).read_text(encoding="utf-8")
    parts = [f"# `{uri}`", f"{_FENCE}python\n{source}\n{_FENCE}"]
    if used := _imported_files(source):
        folder = posixpath.dirname(uri)
        parts.insert(1, "It uses " + ", ".join(f"[`{path}`]({posixpath.relpath(path, folder)})" for path in used) + ".")
    return "\n\n".join(parts) + "\n"


def _imported_files(source: str) -> list[str]:
    """The files of this repository that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = node.module.replace(".", "/")
            found |= {f"{module}.py", *(f"{module}/{name.name}.py" for name in node.names)}
    return sorted(path for path in found if (ROOT / path).is_file())


def _notebook_page(uri: str) -> tuple[str, dict[str, bytes]]:
    """A notebook's cells and stored outputs as Markdown, and its pictures by their paths."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in _cells(uri):
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"{_FENCE}python\n{source}\n{_FENCE}")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            text = output.get("text", data.get("text/plain"))
            if "image/png" in data:
                picture = f"{uri.removesuffix('.ipynb')}_{len(pictures) + 1}.png"
                pictures[picture] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![What this cell draws]({posixpath.basename(picture)})")
            elif text is not None:
                parts.append(f"{_FENCE} {{ .text .output }}\n{''.join(text).rstrip()}\n{_FENCE}")
            else:
                raise PluginError(f"{uri}: an output of {', '.join(data) or output['output_type']}; needs text or PNG")
    return "\n\n".join(parts) + "\n", pictures


def _cells(notebook: str) -> list[dict[str, Any]]:
    return json.loads((ROOT / notebook).read_text(encoding="utf-8"))["cells"]


def _title(notebook: str) -> str:
    return "".join(_cells(notebook)[0]["source"]).splitlines()[0].removeprefix("# ")


def _number(notebook: str) -> str:
    return posixpath.basename(notebook).partition("_")[0]


def _op_page(op: str, notebooks: list[str]) -> str:
    """The contract, by mkdocstrings from the reference's docstring; then the sources, and who uses it."""
    lines = ["---", f"title: {op}", "---", f"::: mxspec.{op}", "    options: {heading_level: 1}", "", "## Sources", ""]
    for backend in dispatch.backends():
        if backend == "reference" or dispatch.has_kernel(op, backend):
            path = f"mxspec/{'reference' if backend == 'reference' else f'{backend}_kernels'}/{op}.py"
            lines.append(f"- {backend}: [{path}](../{path})")
    if peers := [peer for peer in rules.peers() if hasattr(getattr(rules, peer), op)]:
        lines += ["", "## Peers' rules", ""]
        lines += [f"- [rules.{peer}.{op}][mxspec.rules.{peer}.{op}]" for peer in peers]
    use = re.compile(rf'\b{op}[("]')  # a call, or its name as an argument
    if uses := [path for path in notebooks if any(use.search("".join(cell["source"])) for cell in _cells(path))]:
        lines += ["", "## Notebooks that use it", ""]
        lines += [f"- [{_number(path)} {_title(path)}](../{path})" for path in uses]
    return "\n".join(lines) + "\n"


def _modules() -> list[str]:
    """The public modules of mxspec but the ops, which have pages of their own."""
    names = (module.name for module in pkgutil.iter_modules(mxspec.__path__))
    return [name for name in names if not name.startswith("_") and not name.endswith(("reference", "_kernels"))]


def _submodules(package: str) -> list[str]:
    """The public files of a package, but those of which its own `__all__` speaks."""
    module = importlib.import_module(package)
    told = {getattr(getattr(module, name), "__module__", "") for name in getattr(module, "__all__", ())}
    names = (file.name for file in pkgutil.iter_modules(getattr(module, "__path__", [])))
    return [name for name in names if not name.startswith("_") and f"{package}.{name}" not in told]


def _module_page(name: str) -> str:
    lines = ["---", f"title: mxspec.{name}", "---"]
    for level, module in [(1, name), *((2, f"{name}.{file}") for file in _submodules(f"mxspec.{name}"))]:
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
    os.environ |= {"COLUMNS": "100", "NO_COLOR": "1"}  # the same page from every terminal
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        command_line.main([*command, "--help"])
    return out.getvalue().rstrip().replace(f"{{{','.join(dispatch.ops())}}}", "OP")
