"""``celery -A proj rabbitdelay COMMAND``: options in, one call into the library, text or JSON out.

Each command is a file of its own: ``status`` and ``send``, which shows a ``progress_bar``. Read
``group`` (what Celery's entry point names) and ``context`` (what the commands share) first. Work
that is not about the terminal belongs into the package that it is about.
"""
