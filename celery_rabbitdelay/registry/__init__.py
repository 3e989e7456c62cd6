"""The registry: decisions about tasks that wait, in Redis, to be read when they arrive.

A task that waits lies in a queue of the broker, where nobody can take it out again. So whoever
cancels, postpones or supersedes it writes that beside it, and the worker reads it before the task
may run. Code belongs here if it writes or reads what is noted about tasks, jobs and pauses.

Read ``decision`` (what is asked and answered, and the rule), the scripts in ``lua`` (each is one
atomic step; ``arrive.lua`` is the rule that decides, and ``shared.lua`` describes the record of a
task), ``registry`` (calls them), ``jobs``, ``pauses``, ``index`` (the keys, and what waits),
``store`` and ``connection``: these know nothing of Celery and of AMQP. Above them stand what users
call (``waiting``, ``holding``, ``commands``), what the kernel calls (``addition``, ``rows``), and a
worker's part (``bootsteps``, ``decisions``).
"""
