"""Charges, one at a time per order.

In this directory, with a Redis on this machine:

    celery -A orders worker --loglevel INFO     # in one terminal
    python orders.py                            # in another

One Redis holds the locks while it is up. Name three or five independent servers to survive the loss
of one or two: REDLOCK_NODES=redis://a:6379/0,redis://b:6379/0,redis://c:6379/0
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from celery import Celery

from celery_redlock import current_lease, locked

BROKER = os.environ.get("CELERY_BROKER_URL", "redis://localhost:6379/0")
LEDGER = Path(os.environ.get("LEDGER", tempfile.gettempdir()))

app = Celery("orders", broker=BROKER, backend=BROKER)
app.conf.redlock_nodes = os.environ.get("REDLOCK_NODES", "redis://localhost:6379/1").split(",")
# Time for which an order stays locked if this whole machine dies. A charge may take longer: while
# it runs, its lock is extended.
app.conf.redlock_ttl = 10.0


@app.task
@locked("order:<order_id>", retry_backoff=0.5, retry_backoff_max=5.0)
def charge(order_id: str, amount: int) -> int:
    """Add a payment to the sum that was paid for an order.

    It reads, waits and writes: two at a time would lose one of the payments. A charge whose order
    is locked is parked: its worker holds it back, without a pool slot, until the order is free.
    """
    page = LEDGER / f"order-{order_id}.txt"
    paid = int(page.read_text()) if page.exists() else 0
    time.sleep(0.1)  # the payment provider answers
    current_lease().ensure()  # is the order still ours? Else LeaseLost, and nothing is written
    page.write_text(str(paid + amount))
    return paid + amount


if __name__ == "__main__":
    payments = {order: [charge.delay(order, 10) for _ in range(5)] for order in ("blue", "green")}
    for order, charges in payments.items():
        print(f"order {order}: {max(one.get(timeout=60) for one in charges)} paid")
