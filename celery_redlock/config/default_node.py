"""The one node of an app without `redlock_nodes`: another library's Redis, or the broker's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from os import PathLike
from typing import Any
from urllib.parse import SplitResult, parse_qsl, quote, urlencode

from ..protocol.errors import ConfigurationError

__all__ = ["default_node", "is_fallback", "leftover_warning"]

_TLS_ARGUMENTS = {"ssl_ca_certs", "ssl_ca_data", "ssl_ca_path", "ssl_cert_reqs", "ssl_certfile"}
_TLS_ARGUMENTS |= {"ssl_check_hostname", "ssl_ciphers", "ssl_keyfile", "ssl_password"}
"""TLS arguments that every version of redis-py reads from a URL."""
_CERT_REQS = {None: "none", 0: "none", 1: "optional", 2: "required"}
"""The spelling of `ssl.CERT_NONE`, `CERT_OPTIONAL` and `CERT_REQUIRED` in a URL."""


def default_node(app: Any) -> str:
    """Return the URL of the node if `redlock_nodes` is not set.

    Raises:
        ConfigurationError: The broker is not Redis.
    """
    return _migrated_node(app.conf)[1] or _broker(app)


def _migrated_node(conf: Any) -> tuple[str, str]:
    """Return the Redis of celery-once or celery-singleton, if a project migrates (compat/).

    It is read also without the compat modules, so that all processes of an app use the same node,
    whatever they import.

    Returns:
        The setting and its URL; two empty texts if there is none.
    """
    once = conf.get("ONCE")
    own = once.get("settings") if isinstance(once, Mapping) else None
    url = own.get("url") if isinstance(own, Mapping) else None
    for setting, known in (
        ("ONCE['settings']['url']", url),
        ("singleton_backend_url", conf.get("singleton_backend_url")),
    ):
        if isinstance(known, str) and known:
            return setting, known
    return "", ""


def leftover_warning(app: Any) -> str:
    """Return a warning if the node is that of a library that no task here uses; else ""."""
    from ..stores.kinds import identity, parse_nodes

    setting, url = _migrated_node(app.conf)
    of_task = "once" if setting.startswith("ONCE") else "unique_on"
    if app.conf.get("redlock_nodes") is not None or not setting:
        return ""
    if any(hasattr(task, of_task) for task in app.tasks.values()):
        return ""
    (node,) = parse_nodes([url], setting)
    try:
        (broker,) = parse_nodes([_broker(app)])
    except ConfigurationError:
        rest = "and no task here is of the library that it belongs to"
    else:
        if identity(node) == identity(broker):
            return ""
        rest = f"not on the broker's ({broker.name}), and no task here is of that library"
    return (
        f"tasks are locked on the Redis of {setting} ({node.name}), {rest}. Programs without this"
        " setting take their locks elsewhere: remove it if it is left over, or set redlock_nodes"
    )


def is_fallback(app: Any) -> bool:
    """Return True if Celery made this app by itself, for a thread or program without a current one.

    A new thread has no current app, even if the main thread has one.
    """
    return app.main == "default" and not app.set_as_current and not app.conf.get("broker_url")


def _broker(app: Any) -> str:
    """Return the URL of the broker, if it is Redis.

    Raises:
        ConfigurationError: It is not, or its URL or TLS options cannot be used.
    """
    conf = app.conf
    url = conf.get("broker_write_url") or conf.get("broker_url")
    if isinstance(url, (list, tuple)):
        url = url[0] if url else None
    if isinstance(url, str):
        url = url.strip()
        if url.startswith("sentinel://"):
            return _watched(url, conf)
        url = re.split(r";(?![^/]*@)", url)[0]  # do not split within a password
        if url.startswith(("redis+socket://", "unix://")):
            return url
        if url.startswith(("redis://", "rediss://")):
            (parts,) = _parted(url)
            tls = _tls_of(conf, parts.query)
            query = urlencode({**dict(parse_qsl(parts.query)), **tls})
            return parts._replace(scheme="rediss", query=query).geturl() if tls else url
    if is_fallback(app):
        raise ConfigurationError(
            "this thread has no current Celery app, and Celery's own default app has no settings,"
            " so it is not known where the locks are: call app.set_default() once, where your app"
            " is made, or app.set_current() in the thread"
        )
    raise ConfigurationError(
        "redlock_nodes is not set and the broker is no Redis: set redlock_nodes to the URLs of one"
        " or more independent Redis masters, such as ['redis://10.0.0.1:6379/0', ...], or of one"
        " PostgreSQL database: ['postgresql://10.0.0.1/locks'], or etcd cluster",
        no_node=True,
    )


def _parted(*urls: str) -> list[SplitResult]:
    from ..stores.secrecy import parted

    try:
        return [parted(one) for one in urls]
    except ValueError as error:
        raise ConfigurationError(f"the broker's URL: {error}") from None


def _tls_of(conf: Any, query: str) -> dict[str, str]:
    """Return Celery's TLS arguments for the broker; empty if it uses no TLS.

    Raises:
        ConfigurationError: `broker_use_ssl` cannot be written in a URL.
    """
    # If the URL has such arguments, kombu uses only these.
    if inside := {k: v for k, v in parse_qsl(query) if k.startswith("ssl_")}:
        return inside
    given = conf.get("broker_use_ssl") or {}
    wrong = "is no mapping, and Celery speaks no TLS to a Redis then"
    if isinstance(given, Mapping):
        kinds = (str, int, PathLike, type(None))
        plain = {k for k, v in given.items() if isinstance(v, kinds) and "%" not in str(v)}
        # Values with "%" are left out, because redis-py 5.2 decodes %41 in a URL argument twice.
        if not (bad := sorted(str(name) for name in set(given) - (plain & _TLS_ARGUMENTS))):
            return _url_arguments(given)
        wrong = f"has what a Redis node's URL cannot have: {', '.join(bad)}"
    raise ConfigurationError(
        f"broker_use_ssl {wrong}. Write {{'ssl_cert_reqs': 'required', 'ssl_ca_certs': PATH}}, or"
        " set redlock_nodes, as in ['rediss://10.0.0.1:6379/0?ssl_ca_certs=PATH']"
    )


def _url_arguments(given: Mapping[str, Any]) -> dict[str, str]:
    """Return arguments of a connection in their spelling in a URL."""
    certs = {k: _CERT_REQS.get(v, v) for k, v in given.items() if k == "ssl_cert_reqs"}
    return {k: str(v) for k, v in {**given, **certs}.items() if v is not None}


def _watched(url: str, conf: Any) -> str:
    """Return one URL for a broker behind Sentinels; Celery's setting has one URL per Sentinel."""
    options = conf.get("broker_transport_options") or {}
    urls = _parted(*url.split(";"))
    if not options.get("master_name"):
        raise ConfigurationError(
            "the broker is a Redis behind Sentinels, and broker_transport_options has no"
            " master_name: set it, or redlock_nodes, as in"
            " ['sentinel://10.0.0.1:26379,10.0.0.2:26379/mymaster']"
        )
    credentials = next((u.netloc.rpartition("@")[0] for u in urls if "@" in u.netloc), "")
    hosts = ",".join(u.netloc.rpartition("@")[2] for u in urls)
    asked = _url_arguments(options.get("sentinel_kwargs") or {})
    tls = _tls_of(conf, urls[0].query)
    given = {**({"ssl": "true"} if tls else {}), **tls}
    given |= {f"sentinel_{name}": value for name, value in asked.items()}
    db = next((u.path.strip("/") for u in urls if u.path.strip("/")), "0")
    at = f"{credentials.replace('@', '%40')}@" if credentials else ""
    return (
        f"sentinel://{at}{hosts}/{quote(options['master_name'])}?{urlencode({'db': db, **given})}"
    )
