"""Orders, what was charged for them, and the sums of a day that are rebuilt from them."""

from django.db import models


class Order(models.Model):
    amount = models.PositiveIntegerField()
    paid = models.BooleanField(default=False)

    def __str__(self) -> str:
        return f"order {self.pk}"


class Charge(models.Model):
    """Stands for the payment provider: a row is money that has moved, and nobody takes it back."""

    order = models.ForeignKey(Order, models.CASCADE)
    amount = models.PositiveIntegerField()


class Turnover(models.Model):
    """One row, rebuilt from all orders."""

    paid = models.PositiveIntegerField(default=0)
