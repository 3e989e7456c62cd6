"""The modules around the levels: check-in, meditation and distribution, and what they share.

Check-in is an ingest queue for any AMQP client, meditation is the overflow loop for delays above
the capacity, and distribution is the consumer that publishes to the final exchange. They run on
kombu connections and know nothing of Celery, whose workers serve them.

Read ``checkin`` and ``distribution`` (transform one message, without I/O), ``limits`` (what a
message may reach and cost), ``envelope`` and ``forwarding`` (the one way back into the levels,
also for workers); then ``deliveries`` (what a worker serves and counts; how each message is taken
and settled), ``attempts`` (what becomes of a message that is not taken), and ``service`` (the
thread that receives, publishes and acknowledges, and connects again).
"""
