"""The modules around the levels: check-in, meditation and distribution, and what they share.

Check-in is an ingest queue for any AMQP client, meditation is the overflow loop for delays above
the capacity, and distribution is the consumer that publishes to the final exchange. The modules run
on kombu connections and do not use Celery, although Celery's workers serve them.

Read ``checkin`` and ``distribution`` (transform one message, without I/O), ``limits`` (the allowed
destinations, sizes and delays), ``envelope`` and ``forwarding`` (the only way back into the levels,
for modules and workers). Then read ``deliveries`` (consumes and acknowledges), ``answer_times``
(which destinations are slow), ``failures`` (retries or dead-letters a message that cannot be
published) and ``service`` (the thread that consumes, publishes, acknowledges and reconnects).
"""
