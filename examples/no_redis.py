"""Celery without Redis: broker, results and locks in one PostgreSQL database.

The broker is kombu's SQLAlchemy transport, for small loads. It polls, so a task that waits for
its lock begins up to a second after the lock is free. With RabbitMQ it begins at once; everything
else is the same.

pip install 'celery-redlock[postgresql]' sqlalchemy
export DATABASE_URL=postgresql://localhost/shop
celery-redlock --nodes $DATABASE_URL migrate     # the tables of the locks, once
celery -A no_redis worker --loglevel INFO        # in one terminal
python no_redis.py                               # in another: two payments for each of two orders
"""

from __future__ import annotations

import os
import time

from celery import Celery

from celery_redlock import locked

URL = os.environ.get("DATABASE_URL", "postgresql://localhost/shop")
SQLALCHEMY = URL.replace("postgresql://", "postgresql+psycopg://")

app = Celery("no_redis", broker=f"sqla+{SQLALCHEMY}", backend=f"db+{SQLALCHEMY}")
app.conf.redlock_nodes = [URL]
app.conf.redlock_ttl = 10.0


@app.task
@locked("order:<order_id>")
def charge(order_id: str, amount: int) -> list[float]:
    begun = time.time()
    time.sleep(0.5)  # the payment provider thinks
    return [begun, time.time()]


def main() -> None:
    orders = ("blue", "green")
    sent = {order: [charge.delay(order, amount) for amount in (30, 20)] for order in orders}
    for order, results in sent.items():
        first, second = sorted(result.get(timeout=60) for result in results)
        together = second[0] < first[1]
        print(f"order {order}: two charges, {'together' if together else 'one after the other'}")


if __name__ == "__main__":
    main()
