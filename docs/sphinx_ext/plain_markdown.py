"""Each page of the site as plain Markdown beside its HTML, and `llms.txt` (https://llmstxt.org).

A page is its source without what only Sphinx reads; its links lead to other Markdown pages, and to
the pictures and the code of the site. `llms.txt` is the map of the landing page: title, summary,
and a line for each page, of those below another page too.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from repository_links import PLACE, ROOT
from sphinx.application import Sphinx

FENCE = re.compile(r"^(```.*?^```\n)", re.M | re.S)
ITEM = re.compile(r"^[-*\d.]+ \[(.+?)\]\(([^)\s]+\.md)\)(.*?)$(?=\n(?! )|\Z)", re.M | re.S)


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("html-page-context", _announce)
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def _announce(
    app: Sphinx, name: str, _template: str, context: dict[str, Any], _doctree: object
) -> None:
    if name in app.env.found_docs:
        file = f"{posixpath.basename(name)}.md"
        link = f'<link rel="alternate" type="text/markdown" href="{file}">'
        context["metatags"] = context.get("metatags", "") + link


def _write(app: Sphinx, error: Exception | None) -> None:
    if error is not None or app.builder.format != "html":
        return
    for name in app.env.found_docs:
        target = Path(app.outdir) / f"{name}.md"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_page(app, name), encoding="utf-8")
    (Path(app.outdir) / "llms.txt").write_text(_map(app), encoding="utf-8")


def _source(app: Sphinx, name: str) -> str:
    """Return a page without comments and menus."""
    text = app.env.doc2path(name).read_text(encoding="utf-8")
    text = re.sub(r"^```\{toctree\}\n.*?^```\n", "", text, flags=re.M | re.S)
    text = re.sub(r"^<!--.*?-->\n", "", text, flags=re.M | re.S)
    return re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"


def _page(app: Sphinx, name: str) -> str:
    parts = FENCE.split(_source(app, name))  # every second one is code
    parts[::2] = [
        re.sub(r"(?<=\]\()[^)\s]+(?=\))", lambda link: _link(app, name, link[0]), part)
        for part in parts[::2]
    ]
    return "".join(parts)


def _link(app: Sphinx, name: str, link: str) -> str:
    """Return the target of a page's link on the site."""
    path, hash_, anchor = link.partition("#")
    if not path or re.match(r"[a-z]+:", link):
        return link
    file = (Path(app.srcdir) / name).parent / path
    up = "../" * name.count("/")
    inside = posixpath.normpath(posixpath.join(posixpath.dirname(name), path))
    if picture := app.builder.images.get(inside):
        return f"{up}{app.builder.imagedir}/{picture}"
    if inside.removesuffix(".md") in app.env.found_docs:
        return link
    in_repository = file.resolve().relative_to(ROOT).as_posix()
    return f"{up}{PLACE}/{in_repository}.html{hash_}{anchor}"


def _map(app: Sphinx) -> str:
    """Return the title, the first paragraph and the lists of the landing page."""
    root = app.config.root_doc
    title, paragraph, *_ = _source(app, root).split("\n\n")
    summary = " ".join(paragraph.replace("*", "").split())
    sections = re.split(r"^## (.+)\n", _source(app, root), flags=re.M)[1:]
    parts = [f"{title}\n\n> {summary}\n"]
    for heading, text in zip(sections[::2], sections[1::2], strict=True):
        items = "\n".join(_items(app, root, text))
        parts.append(f"## {heading}\n\n{items}\n")
    return "\n".join(parts)


def _items(app: Sphinx, name: str, text: str) -> Iterator[str]:
    """Yield a line for each page that a page lists, and for the pages in the menu of that page."""
    for title, link, about in ITEM.findall(text):
        path = posixpath.normpath(posixpath.join(posixpath.dirname(name), link))
        yield _item(title, path, about)
        below = path.removesuffix(".md")
        menu = app.env.toctree_includes.get(below, [])
        if below != name and menu:
            listed = list(_items(app, below, _source(app, below)))
            yield from listed
            for page in menu:
                if not any(f"({page}.md)" in line for line in listed):
                    yield _item(app.env.titles[page].astext(), f"{page}.md", "")


def _item(title: str, path: str, about: str) -> str:
    words = re.sub(r"\[(.+?)\]\(.*?\)", r"\1", " ".join(about.split())).lstrip(" :,-")
    return f"- [{title}]({path})" + (f": {words}" if words else "")
