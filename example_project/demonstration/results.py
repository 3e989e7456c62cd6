"""The results of a run in Celery's result backend, Redis."""

import json
from typing import Final

from celery.states import SUCCESS
from redis import Redis

#: The number of results that are read in one step.
_RESULTS_AT_ONCE: Final = 1000


def count_succeeded(redis: Redis, prefix: str) -> int:
    """Return the number of tasks with the result SUCCESS.

    Args:
        redis: The result backend's Redis.
        prefix: The ``global_keyprefix`` of the result backend, without the colon at its end.
    """
    keys = list(redis.scan_iter(match=f"{prefix}:celery-task-meta-*", count=_RESULTS_AT_ONCE))
    succeeded = 0
    for first in range(0, len(keys), _RESULTS_AT_ONCE):
        results = redis.mget(keys[first : first + _RESULTS_AT_ONCE])
        succeeded += sum(
            json.loads(result)["status"] == SUCCESS for result in results if result is not None
        )
    return succeeded
