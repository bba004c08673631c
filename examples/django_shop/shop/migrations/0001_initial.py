"""Made by `python manage.py makemigrations`."""

import django.db.models.deletion
from django.db import migrations, models

KEY = models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")


class Migration(migrations.Migration):
    initial = True
    dependencies = ()
    operations = (
        migrations.CreateModel(
            name="Order",
            fields=[
                ("id", KEY),
                ("amount", models.PositiveIntegerField()),
                ("paid", models.BooleanField(default=False)),
            ],
        ),
        migrations.CreateModel(
            name="Turnover",
            fields=[("id", KEY), ("paid", models.PositiveIntegerField(default=0))],
        ),
        migrations.CreateModel(
            name="Charge",
            fields=[
                ("id", KEY),
                ("amount", models.PositiveIntegerField()),
                (
                    "order",
                    models.ForeignKey(on_delete=django.db.models.deletion.CASCADE, to="shop.order"),
                ),
            ],
        ),
    )
