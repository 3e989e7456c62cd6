"""Messages that wait are moved to other levels.

Read ``source`` (takes messages from queues), ``mover`` (publishes them elsewhere, and acknowledges
them once they are confirmed), ``migration`` and ``adoption`` (convert them), and ``destinations``
(binds the queues that they are for).
"""
