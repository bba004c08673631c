"""On the path of one worker of a campaign: its helper process writes a trace as well."""

import sys

if "celery_redlock.helper" in sys.orig_argv:
    from tests.faults import tracing

    tracing.install()
