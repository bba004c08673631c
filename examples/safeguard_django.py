"""A lock, and an optimistic check behind it: Django refuses the late write of a stopped holder.

Locks and rows are in one PostgreSQL database; there is no Redis. The account's version field is the
fencing token of the last lease that opened it. It is one file for easy reading; in a project its
parts are in settings.py, models.py and tasks.py.

pip install 'celery-redlock[postgresql]' django
export DATABASE_URL=postgresql://localhost/shop
celery-redlock --nodes $DATABASE_URL migrate     # the tables of the locks, once
python safeguard_django.py                       # one holder is stopped, another goes on
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import django
from celery import Celery
from django.conf import settings
from psycopg.conninfo import conninfo_to_dict

from celery_redlock import current_lease, locked

URL = os.environ.get("DATABASE_URL", "postgresql://localhost/shop")
place = conninfo_to_dict(URL)
settings.configure(
    CELERY_BROKER_URL="memory://",
    CELERY_REDLOCK_NODES=[URL],
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": place["dbname"],
            **{name.upper(): place.get(name, "") for name in ("host", "port", "user", "password")},
        }
    },
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    USE_TZ=True,
)
django.setup()
from django.db import connection, models  # noqa: E402

app = Celery("shop")
app.config_from_object("django.conf:settings", namespace="CELERY")


class Account(models.Model):
    owner = models.CharField(max_length=50, unique=True)
    balance = models.IntegerField(default=0)
    fencing_token = models.BigIntegerField(default=0)

    class Meta:
        app_label = "shop"

    def __str__(self) -> str:
        return self.owner


class Overtaken(Exception):
    """A later holder has opened the account."""


def opened(owner: str, token: int) -> Account:
    """Raise the account's number to this lease's, then read: earlier holders cannot write now."""
    older = Account.objects.filter(owner=owner, fencing_token__lt=token)
    if not older.update(fencing_token=token):
        raise Overtaken(f"{owner}: a later holder was here")
    return Account.objects.get(owner=owner)


@app.task
# The first safeguard. By default (on_lost="raise") the late holder is interrupted, too, mostly
# before it writes. With "log" only the second safeguard is left.
@locked("account:<owner>", fencing=True, ttl=2.0, wait=30.0, on_lost="log")
def deposit(owner: str, amount: int, stopped: bool = False) -> int:
    token = current_lease().fencing_token or 0
    balance = opened(owner, token).balance
    work(stopped)
    mine = Account.objects.filter(owner=owner, fencing_token=token)
    if not mine.update(balance=balance + amount):  # the second safeguard: compare and write
        raise Overtaken(f"{owner}: a later holder was here")
    return balance + amount


def work(stopped: bool) -> None:
    """Take a while, with no transaction open."""
    if stopped:
        print("working", flush=True)
        sys.stdin.readline()  # here it gets SIGSTOP, for longer than its lease can last


def late() -> None:
    """Be the holder that is stopped."""
    try:
        print(f"the late one: {deposit('ada', 100, stopped=True)} in the account", flush=True)
    except Overtaken as error:
        print(f"the late one: refused, {error}", flush=True)


def main() -> None:
    with connection.schema_editor() as editor:  # in a project: manage.py migrate
        editor.execute("DROP TABLE IF EXISTS shop_account")
        editor.create_model(Account)
    Account.objects.create(owner="ada")
    with subprocess.Popen(
        [sys.executable, __file__, "late"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None and other.stdout is not None
        try:
            assert other.stdout.readline() == "working\n"
            other.send_signal(signal.SIGSTOP)
            print(f"the one after it: {deposit('ada', 50)} in the account", flush=True)
            other.send_signal(signal.SIGCONT)  # it has noticed nothing, and goes on to write
            print(other.communicate("\n", timeout=30)[0], end="")
        finally:
            other.kill()
    print(f"in the end: {Account.objects.get(owner='ada').balance} in the account")


if __name__ == "__main__":
    late() if sys.argv[1:] == ["late"] else main()
