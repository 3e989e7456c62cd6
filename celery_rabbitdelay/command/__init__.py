"""``celery -A proj rabbitdelay COMMAND``: the group, and what all commands share.

Read ``group`` (Celery's entry point, with the table of all commands) and ``shared``; ``levels`` has
``declare`` and ``route``. Each addition has its own commands in its own folder, and is
imported only when one of them is used.
"""
