"""A delay is a number: each digit position is a level, each non-zero digit a queue with a TTL.

Everything here is a value: no module opens a connection or imports Celery. Code belongs here if it
defines how a delay is written, where a message waits, or what its key and headers mean.

Read ``delay``, ``layout`` (the digits), ``routing_key``, ``topology`` (the levels as exchanges,
queues and bindings, and the route of a message) and ``headers`` (how a message's headers are
written, read and checked); then ``shown_url`` (URLs without passwords) and ``wall_clock``.
"""
