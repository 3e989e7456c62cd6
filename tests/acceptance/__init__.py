"""What a user sees: a real worker, a real broker and a real result backend, killed in between.

The nodes come from pytest-celery's fixtures. Without a Docker engine they are processes of this
machine; ``RABBITDELAY_NODES`` chooses (see ``conftest.py``).
"""
