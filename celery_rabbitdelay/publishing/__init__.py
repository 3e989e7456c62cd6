"""Publishing with confirms, declaring on a broker, and the kombu producer.

Code that uses a connection to RabbitMQ belongs here, unless it depends on Celery or belongs to a
module.

Read ``message`` (a waiting message, its bytes, and a message in flight), ``wire`` (frames,
including those of unreadable or too large messages), ``confirm_channel``, ``publish_loop`` (keeps
many messages in flight) and ``publisher`` (connections, their pool, and pipelines); then
``declaration`` and ``refusals`` (why the broker refuses a method); then ``destination`` (the queue
that a message would reach), ``signature`` and ``producer``. ``kombu_internals`` has the uses of
kombu's private parts.
"""
