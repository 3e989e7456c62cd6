"""How Sphinx builds these pages: ``make docs``."""

from typing import Any

from sphinx.application import Sphinx

from celery_rabbitdelay import __version__

project = "celery_rabbitdelay"
author = "the celery_rabbitdelay authors"
copyright = f"2026, {author}"
release = __version__
version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"{project} {release}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_show_sourcelink = False

# The docstrings are in Google's style; their "Attributes" sections describe what autodoc would
# otherwise list a second time.
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"


#: Stands for a colon while napoleon looks at a docstring.
HIDDEN_COLON = "\N{RATIO}"


def setup(app: Sphinx) -> None:
    # Before and behind napoleon, whose priority is 500.
    app.connect("autodoc-process-docstring", hide_colon, priority=400)
    app.connect("autodoc-process-docstring", show_colon, priority=600)
    app.connect("autodoc-skip-member", skip_tuple_fields)


def hide_colon(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Keep napoleon from taking the words before a colon for the type of a property."""
    if what in ("attribute", "data", "property") and lines:
        lines[0] = lines[0].replace(": ", f"{HIDDEN_COLON} ")


def show_colon(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Put the colons back."""
    lines[:] = [line.replace(HIDDEN_COLON, ":") for line in lines]


def skip_tuple_fields(
    app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: object
) -> bool | None:
    """Leave out the fields of named tuples, which their classes describe already."""
    documentation = getattr(obj, "__doc__", None) or ""
    return True if documentation.startswith("Alias for field number") else None
