"""How the documentation site is built: Sphinx over Markdown pages."""

import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

project = "Meshwright"
copyright = "The Meshwright authors, Apache-2.0"
release = metadata.version("meshwright")
version = release

extensions = ["myst_parser", "field_tables", "printed", "shown"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "extensions"]

# Links to headings of another page, and the few Markdown extras that the pages use.
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "deflist"]

html_theme = "furo"
html_title = f"Meshwright {release}"
html_show_sourcelink = False
html_copy_source = False
