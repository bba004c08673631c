"""`redlock web`: the web dashboard, on loopback."""

from __future__ import annotations

from typing import Any

import click

from .context import Site, on_site
from .options import listen_option

__all__ = ["command"]


@click.command("web")
@listen_option(8933, "Where the page is. Port 0: one that is free.")
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="A name under which it may be asked for, besides localhost and the address; again for"
    " more.",
)
@click.option(
    "--token",
    envvar="REDLOCK_WEB_TOKEN",
    help="Lets those who know it free locks: at least 16 characters. On the command line, others on"
    " this machine can see it: better set REDLOCK_WEB_TOKEN in the environment.",
)
@click.option("--private", is_flag=True, help="Reading needs the token as well.")
@click.option(
    "--public",
    is_flag=True,
    help="Let other machines reach it, at that address or through a proxy. Needs a token, for"
    " reading as well.",
)
@on_site
def command(
    site: Site,
    *,
    listen: tuple[str, int],
    hosts: Any,
    token: str | None,
    private: bool,
    public: bool,
) -> None:
    """Serve the web dashboard.

    What is held, who waits, how the nodes vote, what went wrong lately. It is for reading only
    unless there is a token.
    """
    from ..web import make_app
    from ..web.serve import check_bind, is_loopback, names_for, serve

    host, port = listen
    check_bind(host, token, public)
    page = make_app(
        site.app,
        redlock=None if site.app is not None else site.redlock,
        token=token,
        hosts=names_for(host, hosts),
        private=private or public,
        rest=None,
    )
    if not is_loopback(host):
        click.echo(
            "Other machines can reach this page, and nothing is encrypted: anyone who listens on"
            " the way sees the token. Put a proxy with TLS in front of it.",
            err=True,
        )

    def ready(url: str) -> None:
        words = "" if token else "; for reading only, as there is no token"
        site.say({"url": url, "read_only": not token}, f"{url} (Ctrl-C ends it{words})")

    serve(page, host, port, ready)
