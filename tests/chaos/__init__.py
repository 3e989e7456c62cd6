"""Long runs in which something is killed, cut off, filled up or set wrong, beside ``make test``.

``python -m tests.chaos SCENARIO`` plays one scenario, ``python -m tests.chaos all`` plays all. Each
starts a private RabbitMQ, a cluster if it needs one, and keeps a ledger of every task. In the order
in which to read the files:

- ``ledger.py``: what was sent and what was started, the files in which the processes note it, and
  the verdict: what is lost, early, twice or late.
- ``programs.py``: the programs that run as processes.
- ``cluster.py``: the brokers. ``network.py`` cuts them off; ``clocks.py`` sets a process's time.
- ``whereabouts.py``: in which queue a message is at the end.
- ``stage.py``: all of these together.
- ``scenarios.py``: the scenarios; ``schedules.py`` is one that has a verdict of its own.
"""
