"""The check of the site's links finds what it is for. `make docs` runs it on the site."""

import pytest

from docs.links import problems


def site(folder, body):
    (folder / "beside.html").write_text("no page of the site")
    (folder / "site" / "ops").mkdir(parents=True)
    (folder / "site" / "index.html").write_text(f'<h1 id="top">mxspec</h1>{body}')
    (folder / "site" / "ops" / "to_blocked.html").write_text('<h1 id="bytes"></h1><a href="../index.html#top">up</a>')
    (folder / "site" / "a tile.png").write_bytes(b"\x89PNG")
    return folder / "site"


@pytest.mark.parametrize(
    "good",
    [
        '<a href="ops/to_blocked.html">',
        '<a href="ops/to_blocked.html#bytes">',
        '<a href="#top">',
        '<a href=".">',
        '<a href="ops/../index.html?q=e8m0#top">',
        '<img src="a%20tile.png">',
        '<link href="/a%20tile.png">',
        '<a href="https://docs.nvidia.com/cuda/parallel-thread-execution/#tcgen05">',
    ],
)
def test_a_link_that_leads_somewhere(tmp_path, good):
    assert problems(site(tmp_path, good)) == []


@pytest.mark.parametrize(
    ("link", "reason"),
    [
        ("ops/from_blocked.html", "no such file"),
        ("to_blocked.html", "no such file"),
        ("/to_blocked.html", "no such file"),
        ("ops", "no such file"),  # a folder without an index.html
        ("../beside.html", "no such file"),  # but for the folder that the site was built in
        ("ops/to_blocked.html#top", "no such anchor"),
        ("#bottom", "no such anchor"),
        ("", "neither a path nor an https address"),
        ("file:///etc/hosts", "neither a path nor an https address"),
        ("//example.org/page", "neither a path nor an https address"),
        ("https:/docs.nvidia.com", "no address"),
        ("https://docs nvidia.com", "no address"),
        ("https://docs.nvidia.com/a page", "no address"),
        ("https://[docs", "Invalid IPv6 URL"),
    ],
)
def test_a_link_that_leads_nowhere(tmp_path, link, reason):
    assert problems(site(tmp_path, f'<a href="{link}">')) == [f"index.html: {link!r}: {reason}"]


@pytest.mark.parametrize("tag", ["img", "script", "source", "iframe"])
def test_what_a_page_shows(tmp_path, tag):
    assert problems(site(tmp_path, f'<{tag} src="gone.png">')) == ["index.html: 'gone.png': no such file"]


def test_no_links_at_all(tmp_path):
    assert problems(tmp_path) == [f"{tmp_path}: no page with a link"]
    (tmp_path / "index.html").write_text("<h1>mxspec</h1>")
    assert problems(tmp_path) == [f"{tmp_path}: no page with a link"]
