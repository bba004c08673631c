"""Orders that are paid once, in Django. In this directory, with a Redis on this machine:

pip install celery-redlock django
python manage.py migrate
celery -A shop worker --loglevel INFO     # in one terminal
python manage.py buy                      # in another: an order, and five clicks on "pay"
"""

from .celery import app as celery_app

__all__ = ["celery_app"]
