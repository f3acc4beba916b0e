"""How the pages become a site. Every warning is an error in `make check`: a link that leads nowhere doesn't pass."""

import sys
from pathlib import Path

import millstream

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "Millstream"
author = copyright = "The Millstream developers"
version = release = millstream.__version__

extensions = ["myst_parser", "generated_reference"]
exclude_patterns = ["_build", "_ext"]
nitpicky = True

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"Millstream {release}"
html_copy_source = False
html_show_sphinx = False
