"""The modules around the levels: check-in, meditation and distribution, and what they share.

Check-in is an ingest queue for any AMQP client, meditation is the overflow loop for delays above
the capacity, and distribution is the consumer that publishes to the final exchange. They run on
kombu connections and know nothing of Celery, whose workers serve them.

Read ``checkin`` and ``distribution`` (transform one message, without I/O), ``client_tasks`` (what a
client's task may be), ``allowed``, ``bounds`` (what one message may cost), ``envelope``,
``forwarding`` (the messages to publish, and what goes back into the levels) and ``undeliverable``;
then ``module`` (what a worker serves and counts), ``consumer`` (receive, publish, acknowledge) with
``deliveries`` (how much is taken at a time; how each message is checked and settled), ``attempts``
(what becomes of a message that is not taken) and ``destinations`` (which ones do not answer); then
``service`` (the thread that reconnects) and ``probe`` (messages that show how late the levels are).
"""
