"""The demonstration, `python -m celery_redlock.demo`.

`scenario.py` starts servers, a worker and two beats, floods the worker and breaks things; `app.py`
is the app of worker and beats; all record events in a `journal.py`. `checker.py` reads nothing but
that journal, and judges whether the locks held and each tick was sent once; `display.py` and
`timeline.py` show it, live and afterwards.
"""
