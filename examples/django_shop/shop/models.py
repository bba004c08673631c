"""Orders, their charges, and the turnover that is rebuilt from them."""

from django.db import models


class Order(models.Model):
    amount = models.PositiveIntegerField()
    paid = models.BooleanField(default=False)

    def __str__(self) -> str:
        return f"order {self.pk}"


class Charge(models.Model):
    """A stand-in for the payment provider: a row is money that has moved for good."""

    order = models.ForeignKey(Order, models.CASCADE)
    amount = models.PositiveIntegerField()


class Turnover(models.Model):
    """One row, rebuilt from all orders."""

    paid = models.PositiveIntegerField(default=0)
