"""Links from a page to a file of the repository, such as `../examples/beat.py`, on the site.

On a code host such a link shows the file. The site has no repository around it, so each file that a
page links to becomes a page of the site, with its code; a directory becomes a list of its files.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
PLACE = "code"
"""Directory of these pages on the site."""
LEFT_OUT = {"__pycache__", ".pytest_cache", ".ruff_cache", ".mypy_cache"}


def setup(app: Sphinx) -> dict[str, Any]:
    # Before Sphinx's own collectors, which would look for a page or a download of that name.
    app.connect("doctree-read", _replace, priority=100)
    app.connect("html-collect-pages", _pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _replace(app: Sphinx, doctree: nodes.document) -> None:
    for node in list(doctree.findall(_is_link)):
        path = _path(app, node)
        if path is None:
            continue
        up = "../" * app.env.docname.count("/")
        new = nodes.reference("", "", *node.children, refuri=f"{up}{PLACE}/{_name(path)}.html")
        new["repository_path"] = path
        node.replace_self(new)


def _is_link(node: nodes.Node) -> bool:
    return isinstance(node, addnodes.download_reference | addnodes.pending_xref) and (
        node.get("reftype") == "myst"
    )


def _path(app: Sphinx, node: nodes.Element) -> str | None:
    """Return the path in the repository if the link leads there, outside of the pages."""
    target = str(node["reftarget"])
    if target.startswith("#"):
        return None
    pages = Path(app.srcdir)
    file = (pages / app.env.docname).parent / target
    if not file.exists() and node.get("refdomain") == "doc":
        file = file.with_name(file.name + ".md")  # Sphinx took it for one of its pages
    file = file.resolve()
    if not file.exists() or not file.is_relative_to(ROOT):
        return None
    if file.is_relative_to(pages) and file.suffix in (".md", ".svg"):
        return None
    return file.relative_to(ROOT).as_posix()


def _pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    wanted = {
        node["repository_path"]
        for name in app.env.found_docs
        for node in app.env.get_doctree(name).findall(nodes.reference)
        if "repository_path" in node
    }
    done = set()
    while wanted - done:
        path = min(wanted - done)
        done.add(path)
        file = ROOT / path
        if file.is_dir():
            inside = sorted(one for one in file.iterdir() if one.name not in LEFT_OUT)
            wanted |= {one.relative_to(ROOT).as_posix() for one in inside}
            body = _listing(path, inside)
        else:
            body = _code(file)
        title = f"<code>{escape(path)}</code>"
        context = {"title": path, "body": f"<h1>{title}</h1>{body}", "parents": []}
        yield f"{PLACE}/{_name(path)}", context, "page.html"


def _listing(path: str, inside: list[Path]) -> str:
    here = posixpath.dirname(_name(path))
    items = []
    for one in inside:
        name = one.relative_to(ROOT).as_posix()
        link = posixpath.relpath(_name(name), here or ".")
        items.append(f'<li><a href="{escape(link)}.html"><code>{escape(one.name)}</code></a></li>')
    return f"<ul>{''.join(items)}</ul>"


def _code(file: Path) -> str:
    text = file.read_text(encoding="utf-8")
    try:
        lexer: Any = get_lexer_for_filename(file.name)
    except ClassNotFound:
        lexer = TextLexer()
    code = highlight(text, lexer, HtmlFormatter(nowrap=True))
    return f'<div class="highlight"><pre>{code}</pre></div>'


def _name(path: str) -> str:
    """Return the page of a path: the file's whole name, so that two with one stem differ."""
    return path.rstrip("/")
