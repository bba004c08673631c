"""The site of these pages: `make docs`. They are written to be read as plain Markdown as well."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "sphinx_ext"), str(HERE.parent)]

from sphinx.application import Sphinx  # noqa: E402

from celery_redlock import __version__  # noqa: E402

project = "celery_redlock"
author = "celery_redlock contributors"
release = version = __version__

extensions = [
    "myst_parser",
    "plain_markdown",
    "repository_links",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_click",
    "sphinx_copybutton",
]

# Anchors as a code host makes them, so that `page.md#a-heading` leads to the same place on both.
myst_heading_anchors = 4

html_theme = "furo"
html_title = "celery_redlock"
html_static_path = ["static"]
html_css_files = ["pages.css"]
html_copy_source = False
html_show_sphinx = False
# What a reader copies: the command, not what it printed.
copybutton_prompt_text = "$ "

# In docstrings, what stands between single backticks is code.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False

# `-n` makes a name that leads nowhere a warning, and a warning is an error. These are names of
# others, whose pages are on another site, which is not asked while this one is built; and names in
# annotations that have no page here.
nitpick_ignore_regex = [
    ("py:.*", r"(celery|click|collections|kombu|opentelemetry|prometheus_client|pytest|redis)\..*"),
    (
        "py:class",
        r"(celery_redlock\.testing\.memory_nodes\.Memory|Asked|F|celery_redlock\.locking\.(aio\.LoopClient|pauses\.Pause|request\.LockRequest)|LockOptions|LockRequest|NodeSpec|NodeVote|Options|Owner|Page|Patient|Resources|Unpack)",
    ),
]


def setup(app: Sphinx) -> None:
    # The help of a command is plain text: a star in it is a star.
    for part in ("description", "options", "arguments", "epilog"):
        app.connect(f"sphinx-click-process-{part}", _as_plain_text)
    # Napoleon reads the first line of a property's docstring as "type: meaning", where it has a
    # colon; a line before it that shows nothing helps. Ours has to come first.
    app.connect("autodoc-process-docstring", _no_type_before_a_colon, priority=100)


def _as_plain_text(_app: Sphinx, _context: object, lines: list[str]) -> None:
    for number, line in enumerate(lines):
        if not line.lstrip().startswith((".. ", ":")):
            pieces = line.split("`")  # every second one is code already
            pieces[::2] = [piece.replace("*", r"\*") for piece in pieces[::2]]
            lines[number] = "`".join(pieces)


def _no_type_before_a_colon(
    _app: Sphinx, what: str, _name: str, _thing: object, _options: object, lines: list[str]
) -> None:
    if what in ("property", "attribute", "data"):
        lines.insert(0, "\\ ")
