"""`celery-redlock demo`: the demonstration, with its own options."""

from __future__ import annotations

import sys

import click

__all__ = ["command"]


@click.command(
    "demo",
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def command(options: tuple[str, ...]) -> None:
    """Local servers, a worker, two beats, a flood, faults, a verdict (--help: its options)."""
    from ..demo.__main__ import main

    sys.argv = ["celery-redlock demo", *options]
    sys.exit(main())
