"""Check that every link of the built site leads somewhere, and that every page has its Markdown.

Nothing is requested: the form of links to other sites is checked only.

python docs/check_site.py out/docs
"""

from __future__ import annotations

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LINKS = {"a": "href", "link": "href", "img": "src", "script": "src", "source": "src"}
GENERATED = ("code/", "genindex.html", "py-modindex.html", "search.html", "_static/")
"""Pages without a source, and so without Markdown."""
# Links that the theme puts on each page, and whose targets Sphinx makes later or not at all.
IGNORED_SCHEMES = {"data", "mailto"}


class Page(HTMLParser):
    """The links and the anchors of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {value for name in ("id", "name") if (value := values.get(name))}
        link = values.get(LINKS.get(tag, ""))
        if link is not None:
            self.links.append(link)

    handle_startendtag = handle_starttag


def check(site: Path) -> tuple[list[str], int]:
    """Return each fault as a sentence, and the number of links that were checked."""
    pages = {
        file.resolve(): Page(file.read_text(encoding="utf-8")) for file in site.rglob("*.html")
    }
    wrong = [f"{site} has no pages"] if not pages else []
    looked_at = 0
    for file, page in sorted(pages.items()):
        for link in page.links:
            looked_at += 1
            problem = _problem(link, file, pages, site.resolve())
            if problem:
                wrong.append(f"{file.relative_to(site.resolve())}: {link!r} {problem}")
    return wrong, looked_at


def _problem(link: str, file: Path, pages: dict[Path, Page], site: Path) -> str | None:
    try:
        parts = urlsplit(link)
        parts.port  # noqa: B018 (raises for one that is no number)
    except ValueError as error:
        return f"is not an address: {error}"
    if parts.scheme in IGNORED_SCHEMES:
        return None
    if parts.scheme or parts.netloc:
        well_formed = parts.scheme in ("http", "https") and "." in (parts.hostname or "")
        return None if well_formed and " " not in link else "is not a web address"
    path = unquote(parts.path)
    target = (file.parent / path).resolve() if path else file
    if not target.is_relative_to(site):
        return "leaves the site"
    if target.is_dir():
        target = target / "index.html"
    if not target.exists():
        return "leads nowhere"
    anchor = unquote(parts.fragment)
    if anchor and target in pages and anchor not in pages[target].anchors:
        return f"there is no #{anchor} there"
    return None


def check_markdown(site: Path) -> list[str]:
    """Return each fault of the pages' Markdown and of llms.txt as a sentence."""
    pages = {file.relative_to(site).as_posix() for file in site.rglob("*.html")}
    wanted = {page[:-5] + ".md" for page in pages if not page.startswith(GENERATED)}
    found = {file.relative_to(site).as_posix() for file in site.rglob("*.md")}
    wrong = [f"{page} is missing: the Markdown of a page" for page in sorted(wanted - found)]
    listed: set[str] = set()
    for name in [*sorted(found), "llms.txt"]:
        file = site / name
        if not file.exists():
            return [*wrong, f"{name} is missing"]
        text = re.sub(r"^```.*?^```$", "", file.read_text(encoding="utf-8"), flags=re.M | re.S)
        links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if ":" not in link]
        wrong += [
            f"{name}: {link!r} leads nowhere" for link in links if not (file.parent / link).exists()
        ]
        if name == "llms.txt":
            listed = set(links)
    home = {"index.md"}  # it is the map itself
    return wrong + [f"llms.txt does not list {page}" for page in sorted(wanted - listed - home)]


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    site = Path(arguments[0])
    wrong, looked_at = check(site)
    wrong += check_markdown(site)
    for line in wrong:
        print(line, file=sys.stderr)
    print(f"{looked_at} links, {len(wrong)} of them wrong; open {site / 'index.html'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
