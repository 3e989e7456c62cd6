"""The idea: a delay is a number, each digit of it is a level, and each digit is a queue with a TTL.

Everything here is a value: nothing opens a connection, and nothing knows of Celery. It comes in
when it says how a delay is written, where a message waits, or what its keys and headers mean.

Read :mod:`~celery_rabbitdelay.levels.delay` (a delay and its due time), then ``layout`` (the
digits), ``routing_key``, ``topology`` (exchanges, queues and bindings), and then what lies beside
the levels: ``headers`` and ``destination``.
"""
