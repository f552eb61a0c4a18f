"""Settings of the site that `make docs` builds: Markdown pages, Sphinx' own theme, nothing fetched when built or viewed."""

from pathlib import Path

from sphinx.application import Sphinx
from sphinx.config import Config

from megabert.config import reference

project = "MegaBERT"
author = "The MegaBERT authors"
project_copyright = author
extensions = ["myst_parser"]
myst_heading_anchors = 3
exclude_patterns: list[str] = []
html_theme = "alabaster"
html_theme_options = {
    "description": "BERT pre-training from raw text to a model in use",
    "page_width": "1100px",
    "sidebar_width": "230px",
    "fixed_sidebar": True,
}
html_show_sphinx = False
html_copy_source = False


def write_configuration_page(app: Sphinx, _: Config) -> None:
    """Write configuration.md, which git ignores, before Sphinx looks for pages."""
    (Path(app.srcdir) / "configuration.md").write_text(reference.markdown())


def setup(app: Sphinx) -> None:
    app.connect("config-inited", write_configuration_page)
