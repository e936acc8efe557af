"""How Sphinx builds these pages: `make docs`, `make man`. Every warning is an error."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "_ext"))
sys.path.insert(0, str(HERE.parent))

from kvd import __version__  # noqa: E402 - found by the lines above

project = "kvd"
author = "The kvd developers"
project_copyright = "2026, The kvd developers"
version = release = __version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "kvd_reference",
]
exclude_patterns = ["_ext", "README.md"]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["deflist", "colon_fence"]
myst_heading_anchors = 3
myst_links_external_new_tab = False

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"exclude-members": "__init__, __new__"}
napoleon_google_docstring = True
napoleon_numpy_docstring = False

nitpicky = True
# Types in signatures are read, not followed: the standard library's pages are not built here.
nitpick_ignore_regex = [("py:.*", r".*")]

html_theme = "furo"
html_title = f"kvd {release}"
html_copy_source = False
html_show_sourcelink = False
pygments_style = "friendly"
pygments_dark_style = "monokai"

man_pages = [
    ("reference/cli", "kvd", "the KV transfer daemon and its verbs", author, 1),
    ("reference/console", "kvd-tui", "the console of the KV transfer daemon", author, 1),
    ("reference/configuration", "kvd.toml", "configuration of the KV transfer daemon", author, 5),
]
man_show_urls = False
