"""``celery -A proj rabbitdelay COMMAND``: parse options, call the library, print text or JSON.

Read ``group`` (Celery's entry point) and ``context`` (what the commands share), then the commands,
each in its own file: ``status``, ``send`` with ``lines`` (its input) and ``progress_bar``, and
``undeliverable`` with ``undeliverable_redrive`` and ``undeliverable_options``. Code that does not
concern the terminal belongs to the library's other packages.
"""
