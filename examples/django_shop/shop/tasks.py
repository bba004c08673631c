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
    """The lock is outermost: transactions begin after it was taken and end before it is freed.

    So this reads what its predecessor has committed.
    """
    order = Order.objects.get(pk=order_id)
    if order.paid:
        return "was paid already"
    time.sleep(0.2)  # the payment provider thinks
    current_lease().ensure(1)  # still ours, for long enough? Else LeaseLost
    Charge.objects.create(order=order, amount=order.amount)
    with transaction.atomic():
        order.paid = True
        order.save(update_fields=["paid"])
        refresh_turnover.delay_on_commit()
    return "paid"


@shared_task(base=SingletonTask, lock_key="turnover", lock_scope="until_and_while_executing")
def refresh_turnover() -> None:
    """However many orders change, one of these runs and one waits.

    Not `until_executed`: that would drop what changes while one runs and has already read.
    """
    paid = Order.objects.filter(paid=True).aggregate(sum=Sum("amount", default=0))["sum"]
    Turnover.objects.update_or_create(pk=1, defaults={"paid": paid})
