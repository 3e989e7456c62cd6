"""``celery -A proj rabbitdelay COMMAND``: the group, and the code that all commands share.

Read ``group`` (Celery's entry point, with the table of all commands) and ``shared``; ``levels`` has
``declare`` and ``route``. The commands of an addition are in the addition's folder, and are
imported on first use.
"""
