"""A click on "pay". The task is published when the transaction is committed, and never before."""

from celery import uuid
from django.http import HttpRequest, JsonResponse
from django.shortcuts import get_object_or_404
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from .models import Order
from .tasks import charge


@csrf_exempt  # for the example's client; a real shop has a form with a token
@require_POST
def pay(request: HttpRequest, order_id: int) -> JsonResponse:
    order = get_object_or_404(Order, pk=order_id)
    # A worker that is faster than the commit would not find the rows of this request.
    task_id = uuid()
    charge.apply_async_on_commit((order.pk,), task_id=task_id)
    return JsonResponse({"task": task_id}, status=202)
