"""Integrations for other frameworks: see docs/django.md."""
