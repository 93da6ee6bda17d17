"""Settings of Sphinx. `make docs` writes the source tree first (`sitegen`), then builds it; see
docs/make_site.py."""

import importlib.metadata
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from sitegen import inventories

import lipbound

HERE = Path(__file__).parent

project = "lipbound"
author = "The lipbound developers"
project_copyright = f"2026, {author}"
version = release = lipbound.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx.ext.mathjax",
    "sphinx_design",
    "sitegen.docstrings",
]
exclude_patterns = ["files/**"]
default_role = "lipbound"  # sitegen.docstrings
nitpicky = True
suppress_warnings = ["myst.header"]  # lemmas are headings of the third level

# Markdown and notebooks: they are executed by `make notebooks`, whose outputs are shown.
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 3
nb_execution_mode = "off"
nb_ipywidgets_js: dict[str, dict[str, str]] = {}
nb_merge_streams = True

# The package.
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autosummary_generate = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

# Other projects' pages, from stored lists of names, so that the site builds without a network; from
# their own where LIPBOUND_DOCS_ONLINE is set.
intersphinx_mapping = inventories.mapping(online="LIPBOUND_DOCS_ONLINE" in os.environ)
intersphinx_disabled_reftypes: list[str] = []

# Formulas: MathJax from a package, in SVG, so that pages need neither network nor fonts.
MATHJAX = importlib.metadata.distribution("sphinx-mathjax-offline").locate_file(
    "sphinx-mathjax-offline/static/mathjax/tex-svg.js"
)
mathjax_path = "tex-svg.js"
mathjax3_config = {"options": {"enableMenu": False}, "svg": {"fontCache": "global"}}

html_theme = "furo"
html_title = "lipbound"
html_static_path = [str(HERE / "site.css"), str(MATHJAX)]
html_css_files = ["site.css"]
html_copy_source = False
html_show_search_summary = False  # summaries are fetched, which pages opened as files may not do
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#1f5a99", "color-brand-content": "#1f5a99"},
    "dark_css_variables": {"color-brand-primary": "#7db3ec", "color-brand-content": "#7db3ec"},
}
pygments_style = "a11y-light"
pygments_dark_style = "a11y-dark"
