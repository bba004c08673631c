"""The demonstration, `python -m celery_redlock.demo`.

`scenario.py` starts servers, a worker and two beats, floods the worker and breaks things; `app.py`
is what worker and beats run; all write down what happens in a `journal.py`. `checker.py` knows
nothing but that journal and says whether the locks held and each tick was sent once; `display.py`
and `timeline.py` show it, live and afterwards.
"""
