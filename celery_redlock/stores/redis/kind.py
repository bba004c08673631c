"""Redis and Valkey as a kind of store."""

from __future__ import annotations

from ..contract import Can, Kind

__all__ = ["KIND"]

KIND = Kind(
    name="Redis",
    can=Can(fencing="proposed", shared=True, queues=True, keeps=True, quorum=True),
    parse="celery_redlock.stores.redis.address:parse_nodes",
    node="celery_redlock.stores.redis.node:RedisNode",
    reader="celery_redlock.stores.redis.reader:RedisReader",
    subscription="celery_redlock.stores.redis.subscription:RedisSubscription",
    forgets="was it restarted or flushed, does it evict keys",
    verify=("take ssl_cert_reqs and ssl_check_hostname out of its URL, and add ssl_ca_certs=PATH"),
)
