"""What other frameworks take in: see docs/django.md."""
