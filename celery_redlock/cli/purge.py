"""`redlock purge`: purge queues, and free the reservations of their messages."""

from __future__ import annotations

import click

from ..locking.redlock import Redlock
from ..protocol.errors import QuorumUnavailable
from ..protocol.texts import counted, printable
from .context import NO_QUORUM, PROBLEM, REFUSED, Site, can_ask, on_site

__all__ = ["command"]


@click.command("purge")
@click.option(
    *("-Q", "--queues", "queues"),
    required=True,
    metavar="NAMES",
    help="The queues, separated by commas.",
)
@click.option("--dry-run", is_flag=True, help="Show the number of messages, and purge nothing.")
@click.option("--yes", is_flag=True, help="Purge them without asking.")
@on_site
def command(site: Site, *, queues: str, dry_run: bool, yes: bool) -> int:
    """Purge queues, and free the keys that their messages have reserved.

    Messages that workers have fetched stay with them; stop the workers first to purge everything.
    Messages and their reservations are deleted one by one, so you may interrupt it, and call it
    again.

    Exit code 0: purged; 1: there was nothing to purge; 3: too few nodes answered, the rest is still
    in the queue; 4: not purged, because the answer was no or there was no terminal to ask on.
    """
    from ..messages.purge import count, purge, silent_nodes_warning

    app = site.app
    if app is None:
        raise click.UsageError(
            "purge needs an app, not only nodes: celery -A APP redlock purge -Q NAMES"
        )
    names = [name.strip() for name in queues.split(",") if name.strip()]
    if not names:
        raise click.UsageError("-Q names no queue: give one, as -Q celery")
    if dry_run and yes:
        raise click.UsageError("--dry-run purges nothing, --yes purges: give one of them")
    app.loader.import_default_modules()  # their declarations say how many may hold each key
    found = {name: count(app, name) for name in names}
    rows: list[dict[str, object]] = []

    def ended(outcome: str, text: str, code: int) -> int:
        site.say({"outcome": outcome, "said": text, "queues": found, "purged": rows}, text)
        return code

    for name, messages in found.items() if not site.as_json else ():
        click.echo(printable(f"{name}: {counted(messages, 'message')}"))
    if not any(found.values()):
        return ended("gone", "nothing to purge", PROBLEM)
    if dry_run:
        return ended("listed", "nothing was done", 0)
    if not yes and not can_ask():
        why = "there is no terminal to ask on: look with --dry-run, then give --yes"
        return ended("refused", why, REFUSED)
    if not yes and not click.confirm("Purge them? The messages are gone for good.", err=True):
        return ended("refused", "left as they were", REFUSED)
    why = ""
    try:
        for name, messages in found.items():
            for gone in purge(app, name, messages):
                rows.append({"queue": name, **gone._asdict()})
                if gone.resource and not site.as_json:
                    end = "is free" if gone.freed else "is not its own any more"
                    said = f"{gone.task}[{gone.task_id}] is purged: its key {gone.resource} {end}"
                    click.echo(printable(said))
    except QuorumUnavailable as error:
        why = f"; the rest is still there: {error}"
    partly = bool(why)
    freed = sum(bool(row["freed"]) for row in rows)
    if freed and (left := silent_nodes_warning(Redlock.from_app(app))):
        why += f"; {left}"
    said = f"{counted(len(rows), 'message')} purged, {counted(freed, 'reservation')} freed{why}"
    return ended("partly" if partly else "purged", printable(said), NO_QUORUM if partly else 0)
