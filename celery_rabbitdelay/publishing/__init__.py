"""Publishing with confirms, declaring on a broker, and the kombu producer.

What talks to RabbitMQ over a connection of ours comes in here, as long as it knows nothing of what
the modules do with a message, and nothing of Celery.

Read ``message`` (the parts of a message), ``wire`` (its bytes), ``publication`` (a message in
flight), ``confirm_channel``, ``policy`` and ``publish_loop`` (the one engine that keeps many
messages in flight), ``connection``, ``publisher`` and ``pool``; then ``declaration`` with
``amqp_methods`` and ``backlog``; then ``destination`` (the queue that a message would reach) and
``producer``. Private parts of kombu stand in ``kombu_internals``.
"""
