"""Nodes with the restart guard on: what keeps their memory, and a client of their own."""

from __future__ import annotations

import redis

from celery_redlock.server import LocalServer

TTL = 2.0


DURABLE = ("--appendonly", "yes", "--appendfsync", "always")


def admin(server: LocalServer) -> redis.Redis:
    return redis.Redis.from_url(server.url, socket_timeout=5, decode_responses=True)
