"""Take pictures of the dashboard for web.md, in a real browser, with locks on real nodes.

python docs/make_web_pictures.py
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import redis  # noqa: E402

from celery_redlock import Redlock  # noqa: E402
from celery_redlock.protocol.values import Owner  # noqa: E402
from celery_redlock.server import LocalServer, start_servers  # noqa: E402
from celery_redlock.web import make_app  # noqa: E402
from celery_redlock.web.wsgi import Page  # noqa: E402
from tests.support.wait import wait_until  # noqa: E402
from tests.tools.web.browser import browser, look, missing, picture, served  # noqa: E402

PLACE = Path(__file__).with_name("pictures")
SIZE = (1100, 830)
MOST = 200_000
"""Bytes of a picture, at most."""
TASKS = {
    "customer:4711:sync": ("crm.tasks.sync_customer", "worker-b"),
    "invoice:2026-1184": ("billing.tasks.send_invoice", "worker-a"),
    "order:77120": ("shop.tasks.capture_payment", "worker-b"),
    "order:77124": ("shop.tasks.capture_payment", "worker-a"),
    "report:monthly:emea": ("reports.tasks.build", "worker-c"),
}


def fill(redlock: Redlock, servers: list[LocalServer]) -> None:
    """Make locks as a shop has them, some of them in trouble."""

    def owner(number: int, task: str, host: str) -> Owner:
        return Owner(
            host, 3100 + number, f"{number}f2c7d80-6e1b-4c55-9a3f-0b7d2e94c1a{number}", task=task
        )

    for number, (resource, (task, host)) in enumerate(TASKS.items()):
        redlock.acquire(resource, owner=owner(number, task, host), ttl=60 + 7 * number)
    dead = owner(8, "etl.tasks.load", "worker-d").token("0" * 32, time.time() - 312)
    for number, server in enumerate(servers):
        with redis.Redis(port=server.port) as node:
            node.set("redlock:mail:digest#reserved", dead, px=840_000)
            node.set("redlock:stuck:export", dead)
            since = time.time() * 1e6
            node.zadd("redlock:order:77120#line", {f"x:{n}": since - n * 8e5 for n in range(3)})
            if number < 2:
                node.set("redlock:etl:load", dead, px=21_000)


def _one_is_silent(page: Page) -> bool:
    health = page.sources.health
    return health is not None and sum(node["answers"] for node in health.nodes) == 4


def main() -> None:
    if missing():
        sys.exit(missing())
    with start_servers(5) as servers:
        redlock = Redlock([server.url for server in servers], restart_guard="off")
        redlock.connect()
        fill(redlock, servers)
        page = make_app(redlock=redlock, token="a-token-of-an-operator", idle=None)
        with served(page) as url, browser() as driver:
            for name, path, dark in [("web-locks", "/", False), ("web-nodes", "/nodes", True)]:
                look(driver, dark=dark, size=SIZE)
                driver.get(url + path)
                file = PLACE / f"{name}.png"
                picture(driver, file)
                size = file.stat().st_size
                print(f"{file.name}: {size} bytes")
                if size > MOST:
                    sys.exit(f"{file.name} is too large")
                servers[-1].kill()  # for the next picture
                wait_until(lambda: page.sources.nodes() and _one_is_silent(page), 30, "it is seen")
        page.close()
        redlock.close()


if __name__ == "__main__":
    main()
