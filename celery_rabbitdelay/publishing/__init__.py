"""Publishing with confirms, declaring on a broker, and the kombu producer.

Code that uses a RabbitMQ connection belongs here, unless it concerns Celery or what a module does
with a message.

Read ``message`` (the parts of a message), ``properties`` and ``wire`` (its bytes), ``incoming``
(messages that nobody can read, or hold), ``publication`` (a message in flight), ``confirm_channel``
and ``publish_loop`` (the one engine that keeps many messages in flight), ``publisher`` (its
connections) with ``publisher_pool`` and ``pipeline``; then ``declaration``, ``backlog`` and
``permissions`` (which one is missing); then ``destination`` (the queue that a message would reach),
``signature`` (who has said so) and ``producer``. Private parts of kombu stand in
``kombu_internals``.
"""
