"""The operator's work with messages that wait; the command line and Spark call this package.

It knows nothing of Spark, and of terminals only how to show a bar. Read ``undeliverable_reader``
(takes the messages that could not be delivered, and gives back those that stay), ``undeliverable``
(a copy of each), ``undeliverable_filter``, ``undeliverable_summary`` and ``undeliverable_export``;
then ``removal`` (messages that leave their queue) with ``redrive`` and ``purge``, and
``redrive_destinations`` (where an application lets them go); then ``progress_bar`` (shown while
something takes long).
"""
