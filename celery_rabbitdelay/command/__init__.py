"""``celery -A proj rabbitdelay COMMAND``: parse options, call the library, print text or JSON.

Read ``group`` (Celery's entry point), ``context`` (what the commands share) and
``topology_options`` (options of another topology, read by ``parameter_type``), then the commands,
each in its own file: ``status``, ``route``, ``declare`` (also ``delete``),
``export``, ``verify``, ``permissions``, ``migrate`` (also ``transfer``) and ``adopt`` with
``moving`` (what they share), ``undeliverable`` with ``undeliverable_redrive`` and
``undeliverable_options``, and ``send`` with ``lines`` (its input) and ``progress_bar``. Code that
does not concern the terminal belongs to the library's other
packages.
"""
