"""A short program beside a test; both exchange single lines."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Beside(subprocess.Popen[str]):
    """`python ARGUMENTS`; used as a context, it is killed at the end of the block."""

    def __init__(self, *arguments: str) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        super().__init__([sys.executable, *arguments], cwd=ROOT, text=True, **pipes)

    def line(self) -> str:
        """The next that it says."""
        assert self.stdout is not None
        return self.stdout.readline().removesuffix("\n")

    def tell(self, words: str) -> None:
        assert self.stdin is not None
        self.stdin.write(f"{words}\n")
        self.stdin.flush()

    def __exit__(self, *raised: Any) -> None:
        self.kill()
        super().__exit__(*raised)


def at_once(programs: Iterable[tuple[str, ...]]) -> list[str]:
    """Run programs, by their arguments: each says that it is ready, and waits until all are.

    Returns:
        What each said then, to its end.
    """
    with contextlib.ExitStack() as stack:
        started = [stack.enter_context(Beside(*arguments)) for arguments in programs]
        assert {program.line() for program in started} == {"ready"}
        for program in started:
            program.tell("go")
        return [program.communicate(timeout=60.0)[0] for program in started]
