from importlib.metadata import version as installed_version

project = "fp4engine"
author = "The fp4engine authors"
copyright = "2026, The fp4engine authors"
release = version = installed_version("fp4engine")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
exclude_patterns = ["_build"]
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # docstrings name things that have no page; links between pages stay checked
autodoc_typehints = "none"  # shapes and dtypes are said in the docstrings
autodoc_member_order = "bysource"

html_theme = "furo"
html_title = f"fp4engine {release}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["wide.css"]
