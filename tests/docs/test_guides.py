"""The code of the README and of the guides runs, and prints what the page says.

A page's blocks run in order, in one folder and one namespace. A `python` block is executed, or saved if its first line
is `# file: NAME`. A `sh` block is run. A `text` block directly after either of them is the expected output. A comment
`<!-- not run: REASON -->` before a block leaves it out.
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from markdown_it import MarkdownIt

from tests.helpers import ROOT, plain_environment

GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
PAGES = [ROOT / "README.md", *GUIDES]
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
WITHOUT_CODE = {ROOT / "docs" / "guides" / name for name in ("README.md", "glossary.md")}


class Block(NamedTuple):
    kind: str
    source: str
    line: int
    expected: str | None
    not_run: str | None


def blocks(page: Path) -> Iterator[Block]:
    tokens = MarkdownIt().parse(page.read_text(encoding="utf-8"))
    for before, token, after in zip([None, *tokens], tokens, [*tokens[1:], None], strict=False):
        if token.type == "fence" and token.info in ("python", "sh"):
            expected = after.content if after is not None and (after.type, after.info) == ("fence", "text") else None
            reason = NOT_RUN.search(before.content) if before is not None else None
            yield Block(token.info, token.content, token.map[0] + 1, expected, reason and reason[1])


def output_of(block: Block, page: Path, namespace: dict) -> str:
    if block.kind == "sh":
        source = block.source.replace("torchrun", "python -m torch.distributed.run")
        command = ["bash", "-c", f'python() {{ {sys.executable} "$@"; }}\n{source}']
        run = subprocess.run(command, env=plain_environment(), capture_output=True, text=True, timeout=300, check=False)
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout + run.stderr
    if saved := re.match(r"# file: (\S+)\n", block.source):
        Path(saved[1]).write_text(block.source)
        return ""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile("\n" * block.line + block.source, str(page), "exec"), namespace)
    return out.getvalue()


def run(page: Path) -> int:
    """The number of blocks of the page that ran."""
    namespace: dict = {"__name__": "guide"}
    ran = 0
    for block in blocks(page):
        if block.not_run is None:
            out = output_of(block, page, namespace)
            ran += 1
            if block.expected is not None:
                assert out.rstrip() == block.expected.rstrip(), f"{page.name}, line {block.line}"
    return ran


@pytest.mark.turns(6)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(page) or page in WITHOUT_CODE, "no block ran"


def test_a_wrong_output_a_raising_block_and_a_failing_command_are_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    for text, error in [
        ("```python\nprint(1)\n```\n```text\n2\n```", AssertionError),
        ("```sh\necho 1\n```\n```text\n2\n```", AssertionError),
        ("```python\n1 / 0\n```", ZeroDivisionError),
        ("```sh\nfalse\n```", AssertionError),
    ]:
        page.write_text(text)
        with pytest.raises(error):
            run(page)
        page.write_text(f"<!-- not run: a reason -->\n{text}")
        assert run(page) == 0


def test_the_readme_is_short_and_shows_code_at_once():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 1200
    assert text[: text.index("```python")].count("\n") < 30


def test_every_guide_is_in_the_list_of_guides():
    listed = re.findall(r"^\d+\. \[.+?\]\((.+?)\)", (ROOT / "docs/guides/README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == [page.name for page in GUIDES if page.name != "README.md"]
