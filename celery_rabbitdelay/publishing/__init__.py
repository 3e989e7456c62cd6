"""Publishing with confirms, declaring on a broker, and the kombu producer.

What talks to RabbitMQ over a connection of ours comes in here, as long as it knows nothing of what
the modules do with a message, and nothing of Celery.

Read ``destination`` (the queue that a message would reach), ``message`` (its parts), ``wire`` (its
bytes), ``connection``, ``confirm_channel``, ``publish_loop`` (the one engine that keeps many
messages in flight), ``publisher``, ``pool``, ``declaration`` and ``producer``.
"""
