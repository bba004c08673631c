"""One charge at a time per order; one rebuild of the turnover at a time, and one that waits."""

import time

from celery import shared_task
from django.db import transaction
from django.db.models import Sum

from celery_redlock import SingletonTask, current_lease, locked

from .models import Charge, Order, Turnover


@shared_task
@locked("order:<order_id>")
def charge(order_id: int) -> str:
    """Charge an order. The lock is outermost: transactions begin and end inside it.

    So this reads the rows that its predecessor has committed.
    """
    order = Order.objects.get(pk=order_id)
    if order.paid:
        return "was paid already"
    time.sleep(0.2)  # the payment provider thinks
    current_lease().ensure(1)  # LeaseLost, unless the lock is certain for another second
    Charge.objects.create(order=order, amount=order.amount)
    with transaction.atomic():
        order.paid = True
        order.save(update_fields=["paid"])
        refresh_turnover.delay_on_commit()
    return "paid"


@shared_task(base=SingletonTask, lock_key="turnover", lock_scope="until_and_while_executing")
def refresh_turnover() -> None:
    """Rebuild the turnover. However many orders change, one call runs and one waits.

    Not `until_executed`: that would drop a change that comes while a call runs and has read.
    """
    paid = Order.objects.filter(paid=True).aggregate(sum=Sum("amount", default=0))["sum"]
    Turnover.objects.update_or_create(pk=1, defaults={"paid": paid})
