"""The admin only publishes, and never holds a lock: no request waits for a task."""

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest

from .models import Order
from .tasks import charge


@admin.register(Order)
class OrderAdmin(admin.ModelAdmin):
    list_display = ("id", "amount", "paid")
    readonly_fields = ("paid",)  # only the task writes it
    actions = ("charge_again",)

    @admin.action(description="Charge the selected orders")
    def charge_again(self, request: HttpRequest, queryset: QuerySet[Order]) -> None:
        for order in queryset:
            # An order that is being charged at this moment is not charged twice.
            charge.delay_on_commit(order.pk)
        self.message_user(request, f"{len(queryset)} sent")
