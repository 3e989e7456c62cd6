"""``celery -A proj rabbitdelay COMMAND``: one file for each command, gathered in ``group``."""
