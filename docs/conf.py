from importlib.metadata import version as installed_version

project = "fp4engine"
author = "The fp4engine authors"
copyright = "2026, The fp4engine authors"
release = version = installed_version("fp4engine")

extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
nitpicky = True

html_theme = "furo"
html_title = f"fp4engine {release}"
html_copy_source = False
