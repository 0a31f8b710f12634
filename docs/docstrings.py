"""The house's docstrings as Markdown: sections get headings, arguments a list, examples become code, ops links.

Griffe's own readers of docstrings know no section that begins on its heading's line, and take a sentence with a colon
for a name and its type.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from textwrap import dedent

from mxspec import dispatch

_HEADING = re.compile(r"(Args|Shapes|Returns|Yields|Special values|Raises|Example|Source):(?: (.*))?")
_ITEM = re.compile(r"(\w+(?:, \w+)*): (.*)")
_DOCTEST_FLAG = re.compile(r" +# doctest: .*")
_CODE_OR_LESS = re.compile(r"```.*?```|`[^`]*`|<", re.DOTALL)


def markdown(docstring: str, name: str) -> str:
    """The docstring of the object called `name`."""
    text = "\n".join(_fenced(_sections(inspect.cleandoc(docstring).splitlines())))
    text = _CODE_OR_LESS.sub(lambda m: "&lt;" if m[0] == "<" else m[0], text)  # `<` begins no HTML in a docstring
    return link_ops(text, name)


def link_ops(text: str, but: str = "") -> str:
    """Each mention of an op in prose, as a link to its page; not in a heading, in code, or where it is one already."""
    lines, fence = text.split("\n"), ""
    for i, line in enumerate(lines):
        if opening := re.match(r"\s*(`{3,})", line):
            fence = "" if fence == opening[1] else fence or opening[1]
        elif not fence and not line.startswith("#"):
            lines[i] = _link_or_mention().sub(
                lambda m: m[0] if m[1] in (None, but) else f"[{m[0]}][mxspec.{m[1]}]", line
            )
    return "\n".join(lines)


@functools.cache
def _link_or_mention() -> re.Pattern[str]:
    return re.compile(rf"\[[^\]]*\][(\[]|`(?:mxspec\.)?({'|'.join(dispatch.ops())})`")


def _sections(lines: list[str]) -> Iterator[str]:
    while lines:
        line = lines.pop(0)
        heading = _HEADING.fullmatch(line)
        if heading is None:
            yield line
            continue
        end = next((i for i, line in enumerate(lines) if line and not line.startswith(" ")), len(lines))
        block = dedent("\n".join(lines[:end])).splitlines()
        del lines[:end]
        if heading[2]:
            yield f"**{heading[1]}:** {heading[2]}"
        else:
            yield from (f"**{heading[1]}**", "")
        for line in block:
            if heading[1] in ("Args", "Shapes", "Raises") and not line.startswith(" "):
                yield ""
                if item := _ITEM.fullmatch(line):
                    yield ", ".join(f"`{name}`" for name in item[1].split(", "))
                    line = f":   {item[2]}"
            yield line
        yield ""


def _fenced(lines: Iterator[str]) -> Iterator[str]:
    """An example ends, as doctest has it, at the next empty line."""
    inside = False
    for line in lines:
        if line.startswith(">>>") and not inside:
            inside = True
            yield "```pycon"
        elif inside and not line:
            inside = False
            yield "```"
        yield _DOCTEST_FLAG.sub("", line)
    if inside:
        yield "```"
