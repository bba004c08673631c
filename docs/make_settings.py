"""Writes the table of options into settings.md, from the tables the code itself uses.

python docs/make_settings.py
"""

from __future__ import annotations

import sys
from pathlib import Path

PAGE = Path(__file__).with_name("settings.md")
sys.path.insert(0, str(PAGE.parents[1]))

from celery_redlock.config.options import GLOBAL, TASK, Option  # noqa: E402

BEGIN = "<!-- options: written by docs/make_settings.py from celery_redlock/config/options.py -->\n"
END = "<!-- options: end -->\n"


def table() -> str:
    """All options as a Markdown table: those of an app, then those only a task has."""
    lines = [
        "| in the app's settings | on `SingletonTask` | in `@locked` | default | unit | meaning |",
        "|---|---|---|---|---|---|",
    ]
    for name, option in {**GLOBAL, **TASK}.items():
        cells = [
            f"`redlock_{name}`" if name in GLOBAL else "",
            f"`lock_{name}`" if name in TASK else "",
            f"`{name}`" if name in TASK else "",
            f"`{option.default!r}`",
            "s" if "seconds" in option.about else "",
            _meaning(option),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def render(page: str) -> str:
    """The page with the table of today in its place."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"


def _meaning(option: Option) -> str:
    about = option.about.replace("|", "\\|")
    try:
        option.check(object())
    except ValueError as error:
        accepted = str(error)
    # Only the checks of single values speak in this form.
    if accepted.startswith("must be ") and "seconds" not in accepted:
        about += f" Allowed: {accepted.removeprefix('must be ')}."
    return about


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
