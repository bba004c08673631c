"""The demonstration, `python -m celery_redlock.demo`.

`scenario.py` starts servers and a worker, floods it and breaks things; `app.py` is what the worker
runs; both write down what happens in a `journal.py`. `judge.py` knows nothing but that journal and
says whether the locks held; `display.py` and `picture.py` show it, live and afterwards.
"""
