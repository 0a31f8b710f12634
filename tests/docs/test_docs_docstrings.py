"""The house's docstrings, as the site shows them."""

from docs.docstrings import link_ops, markdown

DOCSTRING = """Move bytes.

    As `to_blocked` does, where
    `a <
    b`; <b> is no HTML, and `mx_gemm(...)` no mention. Inf: a colon begins no section.

    Args:
        scale: `(R, C)`, from
            `from_blocked`.
        rows, cols: sizes.

    Shapes:
        Returns `(R, C)`.

    Returns:
        `(out,)`. out: contiguous.

    Special values: NaN stays;
        so does Inf.

    Raises:
        TypeError: the dtype.

    Example:
        >>> to_blocked(scale)  # doctest: +ELLIPSIS
        ['`', '<b>', `to_blocked`]

        Then prose.

        >>> 1
        1

    Source: OCP MX v1.0.
    """

MARKDOWN = """Move bytes.

As [`to_blocked`][mxspec.to_blocked] does, where
`a <
b`; &lt;b> is no HTML, and `mx_gemm(...)` no mention. Inf: a colon begins no section.

**Args**


`scale`
:   `(R, C)`, from
    `from_blocked`.

`rows`, `cols`
:   sizes.

**Shapes**


Returns `(R, C)`.

**Returns**

`(out,)`. out: contiguous.

**Special values:** NaN stays;
so does Inf.

**Raises**


`TypeError`
:   the dtype.

**Example**

```pycon
>>> to_blocked(scale)
['`', '<b>', `to_blocked`]
```

Then prose.

```pycon
>>> 1
1
```

**Source:** OCP MX v1.0."""


def test_a_docstring_with_every_section():
    assert markdown(DOCSTRING, "from_blocked").rstrip() == MARKDOWN
    assert markdown(">>> 1\n1", "") == "```pycon\n>>> 1\n1\n```"


def test_ops_are_linked_in_prose_only():
    kept = "# `to_blocked`\n[tiles of `to_blocked`](x.md), [`to_blocked`][y]\n````text\n```\n`to_blocked`\n````\n"
    prose, linked = "`mxspec.to_blocked`", "[`mxspec.to_blocked`][mxspec.to_blocked]"
    assert link_ops(prose + "\n" + kept + prose) == linked + "\n" + kept + linked
