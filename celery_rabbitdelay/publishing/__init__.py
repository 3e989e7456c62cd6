"""Publishing with confirms, declaring on a broker, and the kombu producer.

Code that uses a RabbitMQ connection belongs here, unless it concerns Celery or what a module does
with a message.

Read ``message`` (a message that waits, its bytes, and one in flight) and ``wire`` (the frames, also
of messages that nobody can read, or hold), ``confirm_channel`` and ``publish_loop`` (the one engine
that keeps many messages in flight), ``publisher`` (its connections, their pool, and pipelines);
then ``declaration`` and ``refusals`` (which setting, permission or limit is in the way); then
``destination`` (the queue that a message would reach), ``signature`` (who has said so) and
``producer``. Private parts of kombu stand in ``kombu_internals``.
"""
