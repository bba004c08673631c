from django.contrib import admin
from django.urls import path

from .views import pay

urlpatterns = [path("admin/", admin.site.urls), path("orders/<int:order_id>/pay", pay)]
