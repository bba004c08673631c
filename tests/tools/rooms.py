"""Imports that rooms may make of each other: one row a room.

docs/make_pictures.py draws the table.
"""

from __future__ import annotations

__all__ = ["ROOMS"]

CORE = ("protocol", "runtime", "events", "keys", "config", "stores", "keepalive", "locking")
CELERY = (*CORE, "messages", "signals", "beat", "worker")

# Room: the rooms that it may import from, besides itself; what it may import of others. The
# standard library is free to all but the pure ones.
ROOMS: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "protocol": ((), set()),
    "runtime": (("protocol",), set()),
    "events": (("protocol",), set()),
    "keys": (("protocol",), set()),
    "stores": (("protocol", "runtime", "events"), {"redis", "psycopg", "kazoo"}),
    "config": (("protocol", "keys", "stores"), {"celery"}),
    "keepalive": (("protocol", "runtime", "events", "stores"), set()),
    "locking": (("protocol", "runtime", "events", "config", "stores", "keepalive"), set()),
    "messages": (
        ("protocol", "runtime", "events", "config", "locking"),
        {"celery", "kombu", "tenacity"},
    ),
    "beat": (("protocol", "runtime", "keys", "config", "locking", "messages"), {"celery"}),
    "worker": ((*CORE, "messages", "beat"), {"celery", "kombu", "billiard"}),
    "task": ((*CORE, "messages", "worker"), {"celery"}),
    "signals": (("messages",), set()),
    "measures": (("protocol", "events", "messages"), set()),
    "metrics": (("protocol", "config", "measures"), {"celery", "prometheus_client"}),
    "tracing": (("protocol", "events", "messages", "measures"), {"opentelemetry"}),
    "guarded_process": (("protocol",), set()),
    "server": (("guarded_process", "protocol"), set()),
    # They may use whatever is below, and none of them another but where it says so.
    "survey": (("protocol", "config", "stores", "locking"), {"prometheus_client"}),
    "doctor": ((*CELERY, "task", "survey"), {"celery", "redis"}),
    "web": ((*CELERY, "task", "survey", "doctor"), {"jinja2", "waitress", "werkzeug"}),
    "compat": ((*CELERY, "task"), {"celery"}),
    "contrib": (("stores",), {"django"}),
    "demo": ((*CELERY, "task", "survey", "server", "testing"), {"celery", "click", "rich"}),
    "testing": ((*CELERY, "task", "survey", "guarded_process", "server"), {"celery", "pytest"}),
    "cli": (
        (*CELERY, "task", "survey", "doctor", "web", "demo", "server", "metrics"),
        {"celery", "click", "prometheus_client", "rich"},
    ),
}
