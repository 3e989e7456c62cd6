"""A delay is a number: each digit position is a level, each non-zero digit a queue with a TTL.

Everything here is a value: nothing opens a connection, and nothing knows of Celery. Code belongs
here if it says how a delay is written, where a message waits, or what its key and headers mean.

Read ``delay``, ``layout`` (the digits), ``routing_key``, ``topology`` (the levels as exchanges,
queues and bindings, and the route of a message) and ``headers`` (what is written into a message's
headers, and what is believed of them); then ``shown_url`` (URLs without passwords) and
``wall_clock``.
"""
