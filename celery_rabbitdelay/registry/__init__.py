"""The registry: decisions about waiting tasks, kept in Redis until the tasks arrive.

A waiting task is a message in a queue, and RabbitMQ cannot remove a single message from a queue. So
a cancellation, a postponement or a newer task with the same key writes a decision to Redis, and the
worker reads the decision before the task runs. Code belongs here if it reads or writes the records
of tasks, jobs and pauses.

Read ``decision`` (the rule and its values), the scripts in ``lua`` (every script is atomic;
``arrive.lua`` is the rule, and ``shared.lua`` describes the record of a task), ``registry`` (calls
the scripts), ``jobs``, ``pauses``, ``index`` (the keys and the index of waiting tasks), ``store``
and ``connection``. None of these modules uses Celery or AMQP. Other modules build on these:
``waiting``, ``holding`` and ``commands`` serve users, ``known`` explains why a task has not run,
``addition`` and ``rows`` implement the kernel's seams, and ``bootsteps`` and ``decisions`` run in
workers.
"""
