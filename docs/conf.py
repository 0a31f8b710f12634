"""The site's configuration. Its pages are the repository's own files, and the pages that `docs/pages.py` writes."""

import os
import sys
from pathlib import Path

os.environ |= {"MPLBACKEND": "agg", "COLUMNS": "90", "NO_COLOR": "1"}  # the same pages from every terminal
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

project = "mxspec"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "pages",
]
root_doc = "README"
# The navigation: the pages below a page that has no list of links.
pages = {"Ops": "ops", "Notebooks": "notebooks", "Reference": "reference", "Figures": "figures"}
trees = {
    "README": ["Guides <docs/guides/README>", "Formats <docs/formats/README>"]
    + [f"{title} <docs/api/{page}>" for title, page in pages.items()]
    + ["CONTRIBUTING"],
    "CONTRIBUTING": ["docs/house", "docs/api/internals", "CHANGELOG"],
}
include_patterns = ["*.md", "docs/**.md", "docs/api/*.rst", "notebooks/*.ipynb", "benchmarks/**.md"]
include_patterns += ["mxspec/**.py", "examples/**.py", "benchmarks/**.py"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb", ".rst": "restructuredtext", ".py": "restructuredtext"}

# A docstring writes code in single backquotes. They become a link if the code is a public name.
default_role = "py:obj"
add_module_names = False
python_maximum_signature_line_length = 88
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "undoc-members": True}
autosummary_generate = False
napoleon_use_ivar = True
napoleon_custom_sections = ["Returns", "Yields", "Shapes", "Special values", "Source"]
# A build without a network uses the stored inventory. It has the names of torch that our signatures use.
intersphinx_mapping = {"torch": ("https://docs.pytorch.org/docs/stable/", (None, "docs/torch.inv"))}
intersphinx_timeout = 5

suppress_warnings = ["myst.header"]  # the pages of stored runs go from # to ###
nb_execution_mode = "off"
nb_execution_cache_path = "build/jupyter_cache"
nb_render_image_options = {"alt": "What this cell draws. The cell or the next one prints the same as text."}
myst_heading_anchors = 4
myst_enable_extensions = ["dollarmath"]

html_title = "mxspec"
html_theme = "pydata_sphinx_theme"
html_theme_options = {
    "header_links_before_dropdown": 7,
    "navbar_align": "left",
    "navbar_persistent": ["search-button"],
    "secondary_sidebar_items": ["page-toc"],
    "footer_end": [],
}
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
