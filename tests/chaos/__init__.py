"""Long runs in which something is killed, cut off, filled up or set wrong, beside ``make test``.

``python -m tests.chaos SCENARIO`` plays one scenario, ``python -m tests.chaos all`` plays all. Each
starts a private RabbitMQ, a cluster if it needs one, and keeps a ledger of every task. In the order
in which to read the files:

- ``ledger.py``: what was sent and what was started, and the files in which the processes note it.
- ``verdict.py``: what is lost, early, twice or late, told from the ledger alone.
- ``programs.py``: the programs that run as processes.
- ``cluster.py``: the brokers. ``network.py``, ``proxy.py`` and ``clocks.py``: what can be put
  between them, or done to them.
- ``whereabouts.py``: in which queue a message is at the end.
- ``stage.py``: all of these together.
- ``scenarios.py``: the scenarios; ``schedules.py`` is one that has a verdict of its own,
  ``instants.py``.
"""
