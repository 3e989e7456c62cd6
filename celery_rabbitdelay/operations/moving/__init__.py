"""Messages that wait are moved to other levels.

Read ``source`` (takes messages from queues), ``mover`` (binds the queues that they are for,
publishes them elsewhere, and acknowledges them once they are confirmed), ``migration`` and
``adoption`` (convert them).
"""
