"""A lock, and an optimistic check behind it: SQLAlchemy refuses a stopped holder's late write.

Locks and rows are in one PostgreSQL database; there is no Redis. The account's version column is
the fencing token of the last lease that opened it.

pip install 'celery-redlock[postgresql]' sqlalchemy
export DATABASE_URL=postgresql://localhost/shop
celery-redlock --nodes $DATABASE_URL migrate     # the tables of the locks, once
python safeguard_sqlalchemy.py                   # one holder is stopped, another goes on
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from celery import Celery
from sqlalchemy import BigInteger, create_engine, update
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.orm.exc import StaleDataError

from celery_redlock import current_lease, locked

URL = os.environ.get("DATABASE_URL", "postgresql://localhost/shop")
engine = create_engine(URL.replace("postgresql://", "postgresql+psycopg://"))
app = Celery("shop", broker="memory://")
app.conf.redlock_nodes = [URL]


class Base(DeclarativeBase):
    pass


class Account(Base):
    __tablename__ = "account"

    owner: Mapped[str] = mapped_column(primary_key=True)
    balance: Mapped[int] = mapped_column(default=0)
    fencing_token: Mapped[int] = mapped_column(BigInteger, default=0)

    # Each UPDATE of an account has WHERE fencing_token = <the value that was read>.
    __mapper_args__ = {"version_id_col": fencing_token, "version_id_generator": False}  # noqa: RUF012


class Overtaken(Exception):
    """A later holder has opened the account."""


def opened(session: Session, owner: str) -> Account:
    """Raise the account's number to this lease's, then read: earlier holders cannot write now."""
    token = current_lease().fencing_token
    mine = update(Account).where(Account.owner == owner, Account.fencing_token < token)
    account = session.scalar(mine.values(fencing_token=token).returning(Account))
    if account is None:
        raise Overtaken(f"{owner}: a later holder was here")
    session.commit()
    return account


@app.task
# The first safeguard. By default (on_lost="raise") the late holder is interrupted, too, mostly
# before it writes. With "log" only the second safeguard is left.
@locked("account:<owner>", fencing=True, ttl=2.0, wait=30.0, on_lost="log")
def deposit(owner: str, amount: int, stopped: bool = False) -> int:
    with Session(engine, expire_on_commit=False) as session:
        account = opened(session, owner)
        work(stopped)
        account.balance += amount
        try:
            session.commit()  # the second safeguard: it fails if another holder has opened it
        except StaleDataError:
            raise Overtaken(f"{owner}: a later holder was here") from None
        return account.balance


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
    Base.metadata.drop_all(engine)
    Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        session.add(Account(owner="ada", balance=0, fencing_token=0))
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
    with Session(engine) as session:
        print(f"in the end: {session.get_one(Account, 'ada').balance} in the account")


if __name__ == "__main__":
    late() if sys.argv[1:] == ["late"] else main()
