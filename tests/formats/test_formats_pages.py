"""The rules of docs/formats: their numbers, their words, and the cases and tests that they name."""

import ast
import re
from fnmatch import fnmatchcase
from functools import cache

import pytest

from mxspec import check, dispatch, vectors
from tests.helpers import ROOT

PAGES = {"README": "COMMON", "mx": "MX", "fp8_blocks": "FP8", "nvfp4": "NVFP4", "scale_layouts": "LAYOUT"}
RULE = re.compile(r"^\*\*([A-Z0-9]+)-(\d+)\.\*\* (.*?)(?=^\*\*[A-Z0-9]+-\d+\.\*\*|^## |\Z)", re.MULTILINE | re.DOTALL)
WITNESSES = re.compile(r"^(Cases|Tests): `(.*)`$", re.MULTILINE)
NAMED = re.compile(r"([\w*/.]+)((?: \"[^\"]+\")+)(?:; |$)")


def text_of(page):
    return (ROOT / "docs" / "formats" / f"{page}.md").read_text(encoding="utf-8")


def rules_of(text):
    """Each rule of a page: its prefix, its number and its text, with the lines that name cases."""
    return [(prefix, int(number), words) for prefix, number, words in RULE.findall(text)]


def named_in(kind, words):
    """`(op or file, pattern)` of the lines of a rule that begin with `Cases:` or `Tests:`."""
    for line in [rest for found, rest in WITNESSES.findall(words) if found == kind]:
        assert NAMED.sub("", line) == "", f'not of the form `name "pattern"; name "pattern"`: {line}'
        for name, patterns in NAMED.findall(line):
            yield from ((name, pattern) for pattern in re.findall(r'"([^"]+)"', patterns))


@cache
def names_of(op):
    return [case.name for case in check.cases_of(op)]


def unmatched(op, pattern):
    """What is wrong with a name and a pattern in a line of cases, or None."""
    ops = [known for known in dispatch.ops() if fnmatchcase(known, op)]
    if not ops:
        return f"no op is named {op}"
    missing = [known for known in ops if not any(fnmatchcase(name, pattern) for name in names_of(known))]
    return f"{missing} has no case {pattern!r}" if missing else None


RULES = [(page, *rule) for page in PAGES for rule in rules_of(text_of(page))]


def test_every_page_is_read():
    assert {path.stem for path in (ROOT / "docs" / "formats").glob("*.md")} == set(PAGES)
    assert len(RULES) > 80


@pytest.mark.parametrize("page", PAGES)
def test_rules_are_numbered_in_order(page):
    rules = rules_of(text_of(page))
    assert [(prefix, number) for prefix, number, _ in rules] == [(PAGES[page], n + 1) for n in range(len(rules))]


@pytest.mark.parametrize("page", PAGES)
def test_the_word_must_stands_in_rules_alone_and_in_each(page):
    text = text_of(page)
    assert all(re.search(r"\bMUST\b", words) for _, _, words in rules_of(text))
    # A rule ends with its witnesses; what follows up to the next rule explains.
    outside = re.sub(r"^\*\*[A-Z0-9]+-\d+\.\*\* .*?^(?:Cases|Tests): ", "", text, flags=re.MULTILINE | re.DOTALL)
    found = [line for line in outside.splitlines() if re.search(r"\bMUST\b", line)]
    assert len(found) == (page == "README"), found  # the line that says what the word means


@pytest.mark.parametrize(("page", "prefix", "number", "words"), RULES, ids=[f"{rule[1]}-{rule[2]}" for rule in RULES])
def test_a_rule_names_cases_and_tests_that_exist(page, prefix, number, words):
    cases, tests = list(named_in("Cases", words)), list(named_in("Tests", words))
    assert cases or tests, "no witness"
    assert len(WITNESSES.findall(words)) == len(re.findall("^(?:Cases|Tests)", words, re.MULTILINE)), (
        "not in backquotes"
    )
    problems = [problem for op, pattern in cases if (problem := unmatched(op, pattern))]
    for file, pattern in tests:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        if not any(fnmatchcase(name, pattern) and name.startswith("test_") for name in functions):
            problems.append(f"{file} has no test {pattern!r}")
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("page", PAGES)
def test_no_line_of_a_paragraph_begins_as_a_list_does(page):
    """A formula that is broken before its `+` or `*` would be a list on the site."""
    list_item = re.compile(r"([-+*]|\d+[.)]) ")
    for paragraph in text_of(page).split("\n\n"):
        lines = paragraph.splitlines()
        if lines and not list_item.match(lines[0]):
            assert not any(map(list_item.match, lines)), paragraph


def test_a_rule_that_is_referred_to_exists():
    known = {f"{prefix}-{number}" for _, prefix, number, _ in RULES}
    for page in PAGES:
        for name in re.findall(rf"\b(?:{'|'.join(PAGES.values())})-\d+\b", text_of(page)):
            assert name in known, f"{page}: {name}"


@pytest.mark.parametrize("op", dispatch.ops())
def test_every_op_has_rules_of_its_own(op):
    """Rules that name it without `*`, its refusals among what they name."""
    patterns = [pattern for *_, words in RULES for name, pattern in named_in("Cases", words) if name == op]
    assert len(set(patterns)) > 3
    assert any(fnmatchcase("refused: ", pattern) for pattern in patterns)


def test_the_pages_are_of_the_version_of_the_vectors():
    assert f"Version of these pages: {vectors.VERSION}." in text_of("README")


def test_a_page_that_names_no_case_is_found():
    assert unmatched("mx_quantize", "edge blocks, *") is None
    assert "has no case" in unmatched("mx_quantize", "edge block, *")
    assert "has no case" in unmatched("*", "edge blocks, *")
    assert "no op" in unmatched("mx_quantise", "*")
    with pytest.raises(AssertionError, match="not of the form"):
        list(named_in("Cases", 'Cases: `mx_quantize "edge blocks", "every exponent"`'))
