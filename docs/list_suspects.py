"""List names and sentences that probably need a second reading. Nothing here proves a fault.

python docs/list_suspects.py [--all] [--strict]

Prints how many there are of each kind; --all lists them all. --strict lists the docstrings with an
opening such as "What" and the tests with a name of this kind, and exits with 1 if there are any.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACES = ("celery_redlock", "tests")
OPENING = re.compile(r"(What|Whether|How|Who|Of|Which|That)\b")
TEST = re.compile(
    r"test_(who|what|one|of|and|nor|so|it|but|or|then|nobody|neither|whose|that|which)(_|$)"
)
SENTENCES = {
    # "who waits", "what is parked": a relative clause without a noun in front of it.
    "bare relative clause": re.compile(
        r"(?:^|[.,;:(]\s|\b(?:of|to|by|for|in|and|or|but|with|than|as|is|those|one)\s)"
        r"(?:who|what|whoever)\s(?:is|are|was|were|has|have|had|(?!this|its)\w+s)\b",
        re.I,
    ),
    "told, hears, is to be": re.compile(r"\b(?:told|tells?|heard|hears?|(?:is|are) to be)\b", re.I),
}
SUBJECT = 72
"""Characters of the subject of a commit, at most."""
COMMITS = 50
"""How many of the latest commits are looked at."""
FATAL = ("docstring opening", "test name")


def suspects() -> Iterator[tuple[str, str, str]]:
    """Each suspect: its kind, its place, its text."""
    for path in sorted(path for place in PLACES for path in (ROOT / place).rglob("*.py")):
        where, source = path.relative_to(ROOT), path.read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and TEST.match(node.name):
                yield "test name", f"{where}:{node.lineno}", node.name
            text = getattr(node.value, "value", None) if isinstance(node, ast.Expr) else None
            if isinstance(text, str):  # an attribute's docstring, too
                if OPENING.match(text):
                    yield "docstring opening", f"{where}:{node.lineno}", text.split("\n")[0]
                yield from _in_sentences(text, f"{where}:{node.lineno}")
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield from _in_sentences(token.string.lstrip("# "), f"{where}:{token.start[0]}")
    log = ["git", "-C", str(ROOT), "log", f"-{COMMITS}", "--format=%h %s"]
    for line in subprocess.run(log, capture_output=True, text=True).stdout.splitlines():
        commit, _, subject = line.partition(" ")
        if len(subject) > SUBJECT:
            yield "commit subject", commit, subject


def _in_sentences(text: str, where: str) -> Iterator[tuple[str, str, str]]:
    for kind, pattern in SENTENCES.items():
        if found := pattern.search(text):
            yield kind, where, " ".join(text[max(0, found.start() - 20) : found.end() + 20].split())


if __name__ == "__main__":
    found = list(suspects())
    strict = "--strict" in sys.argv
    for kind, where, text in found:
        if "--all" in sys.argv or (strict and kind in FATAL):
            print(f"{where}: {kind}: {text}")
    counts = Counter(kind for kind, _, _ in found)
    print(", ".join(f"{kind}: {counts[kind]}" for kind in (*FATAL, *SENTENCES, "commit subject")))
    sys.exit(strict and any(counts[kind] for kind in FATAL))
