"""Make an order, click five times on "pay", and print the charges."""

from typing import Any

from celery.result import AsyncResult
from django.core.management.base import BaseCommand
from django.test import Client

from shop.models import Charge, Order


class Command(BaseCommand):
    def handle(self, *args: Any, **options: Any) -> None:
        order = Order.objects.create(amount=50)
        customer = Client(headers={"host": "localhost"})
        clicks = [customer.post(f"/orders/{order.pk}/pay").json() for _ in range(5)]
        for click in clicks:
            self.stdout.write(AsyncResult(click["task"]).get(timeout=30))
        charges = Charge.objects.filter(order=order)
        self.stdout.write(f"{order}: charged {charges.count()} x {order.amount}")
