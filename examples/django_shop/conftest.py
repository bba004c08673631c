# conftest.py
import pytest
from shop.celery import app


@pytest.fixture(autouse=True)
def without_servers(fake_redlock):
    app.conf.update(broker_url="memory://", result_backend="cache+memory://")
