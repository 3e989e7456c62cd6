"""``celery -A proj rabbitdelay COMMAND``: parse options, call the library, print text or JSON.

Read ``group`` (Celery's entry point) and ``shared`` (what the commands share), then the commands:
``send``, ``waiting`` (``pending``, ``show``, ``forecast``, ``cancel``, ``postpone``, ``run-now``
and ``job``), ``status`` (also ``verify``), ``route``, ``declare`` (also ``delete``, ``export`` and
``permissions``), ``moving`` (``migrate``, ``transfer`` and ``adopt``), ``undeliverable``,
``pausing`` (``pause`` and ``resume``) and ``web``; ``schedules`` is in
:mod:`celery_rabbitdelay.schedules.command`. Code that does not concern the
terminal belongs to the library's other packages.
"""
