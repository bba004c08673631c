"""A Django app with one migration: the tables that locks in PostgreSQL need."""
