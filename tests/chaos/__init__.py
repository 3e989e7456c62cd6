"""Long runs in which something is killed, cut off, filled up or set wrong, beside ``make test``.

``python -m tests.chaos SCENARIO`` plays one scenario, ``python -m tests.chaos all`` plays all. Each
starts a private RabbitMQ, a cluster if it needs one, and keeps a ledger of every task. In the order
in which to read the files:

- ``ledger.py``: what was sent, decided and started, and the files in which the processes note it.
- ``checker.py``: the verdict on a ledger: what is lost, early, twice or late. It shares no code
  with the package.
- ``application.py``: the application, and what a producer sends. ``programs.py``: the processes.
- ``cluster.py``: the brokers. ``network.py`` cuts them off; ``preloads.py``: wrong clocks.
- ``whereabouts.py``: in which queue a message is at the end.
- ``stage.py``: all of these together.
- ``kinds.py``: the kinds of tasks of the soak. ``faults.py``: its faults. ``soak.py`` plays it.
- ``scenarios.py``: all scenarios; those but the soak have figures of their own to keep.
"""
