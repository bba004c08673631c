"""`python -m celery_redlock.demo`, also `celery-redlock demo`: options of the demonstration."""

from __future__ import annotations

import sys
from pathlib import Path

import click

__all__ = ["command"]


@click.command("demo", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--plain", is_flag=True, help="Print plain lines on a terminal as well.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path(),
    metavar="DIR",
    help="Where to write the picture, demo-timeline.svg; the current directory unless given.",
)
@click.option("--keep", is_flag=True, help="Leave journals and logs there as well.")
@click.option(
    "--store",
    type=click.Choice(["redis", "postgresql", "etcd"]),
    default="redis",
    help="What the locks are kept in: five Redis nodes, one PostgreSQL database, or etcd.",
)
@click.option("--without-locks", is_flag=True, help="Switch the locks off, and see it fail.")
def command(plain: bool, out: Path, keep: bool, store: str, without_locks: bool) -> None:
    """Run the demonstration on local servers.

    It starts servers, a worker and two beats, sends a flood of tasks, kills some of the processes,
    and judges what happened: in about a minute. Exit code 1 if a lock or a tick did not hold.
    """
    import logging

    from celery_redlock.demo.display import make_display
    from celery_redlock.demo.scenario import run
    from celery_redlock.protocol.errors import RedlockError

    # The worker's log reports the dead nodes; no need to print that here.
    logging.getLogger("celery_redlock").addHandler(logging.NullHandler())

    try:
        sys.exit(run(make_display(plain), out, keep=keep, locks=not without_locks, store=store))
    except RedlockError as error:
        click.echo(f"the demonstration cannot start: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    command()
