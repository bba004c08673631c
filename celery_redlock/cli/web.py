"""`redlock web`: serve the web dashboard, by default on loopback."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import click

from .context import Site, listen_option, on_site

__all__ = ["command"]


@click.command("web")
@listen_option(8933, "Where to serve the page. Port 0 picks a free one.")
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="Answer under this host name, too, besides localhost and the address; repeat it for more.",
)
@click.option(
    "--token",
    envvar="REDLOCK_WEB_TOKEN",
    help="Whoever has this token may free locks; at least 16 characters. Others on this machine can"
    " see it on the command line: it is better to set REDLOCK_WEB_TOKEN in the environment.",
)
@click.option("--private", is_flag=True, help="Ask for the token for reading, too.")
@click.option(
    "--public",
    is_flag=True,
    help="Let other machines reach it, at that address or through a proxy. It needs a token, for"
    " reading, too.",
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

    It shows held locks, waiters, the votes of the nodes, and recent problems. Without a token it is
    read-only.
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

    with closing(page):
        serve(page, host, port, ready)
