"""No Redis at all: messages, results and locks are kept in one PostgreSQL database.

    pip install 'celery-redlock[postgresql]' sqlalchemy
    export DATABASE_URL=postgresql://shop@127.0.0.1/shop
    celery -A without_redis redlock migrate
    celery -A without_redis worker
    python without_redis.py

Ten charges of two orders are sent at once. Those of one order run one after another.
"""

import os
import time
from pathlib import Path

from celery import Celery

from celery_redlock import locked

URL = os.environ["DATABASE_URL"]
# Celery reaches it with SQLAlchemy, by the same client.
TABLES = URL.replace("postgresql://", "postgresql+psycopg://", 1)

app = Celery("without_redis", broker=f"sqla+{TABLES}", backend=f"db+{TABLES}")
app.conf.redlock_nodes = [URL]
app.conf.broker_connection_retry_on_startup = True
app.conf.worker_enable_remote_control = False  # this transport has none


@app.task
@locked("order:<order_id>")
def charge(order_id: str, amount: int) -> int:
    """Add to what an order has paid, which takes a moment: two at once would lose one payment."""
    paid = Path(f"order-{order_id}.txt")
    before = int(paid.read_text()) if paid.exists() else 0
    time.sleep(0.1)
    paid.write_text(str(before + amount))
    return before + amount


if __name__ == "__main__":
    charges = [charge.delay(order_id, 10) for _ in range(5) for order_id in ("blue", "green")]
    for one in charges:
        one.get(timeout=30)
    for order_id in ("blue", "green"):
        print(f"order {order_id}: {Path(f'order-{order_id}.txt').read_text()} paid")
