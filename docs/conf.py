"""How the pages become a site. Every warning is an error in `make check`: a link that leads nowhere doesn't pass."""

import millstream

project = "Millstream"
author = copyright = "The Millstream developers"
version = release = millstream.__version__

extensions = ["myst_parser"]
exclude_patterns = ["_build"]
nitpicky = True

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

html_theme = "furo"
html_title = f"Millstream {release}"
html_copy_source = False
html_show_sphinx = False
