"""The names of the registry's keys in Redis.

Each key has a hash tag, the part in braces, so that Redis Cluster keeps keys with the same tag on
one server (https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/#hash-tags):
all keys of one task are changed in one step, and different tasks are spread over all servers.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Final, NamedTuple

#: How many hash tags there are.
SHARDS: Final = 32


class Names(NamedTuple):
    """The names of all keys under one prefix.

    Attributes:
        prefix: The first part of every name; the same as that of the levels.
    """

    prefix: str

    def task(self, task_id: str) -> str:
        """Return the key of a task's record."""
        return f"{self._tagged(task_id)}:task:{task_id}"

    def message(self, task_id: str) -> str:
        """Return the key of what it takes to send a tracked task anew; ``shared.lua`` writes it."""
        return f"{self._tagged(task_id)}:message:{task_id}"

    def id_of(self, record: str) -> str:
        """Return the id of the task whose record has a key."""
        return record.partition("}:task:")[2]

    def key(self, key: str) -> str:
        """Return the key of what is known about the tasks that were sent with ``key=``."""
        return f"{self._tagged(key)}:key:{key}"

    def job(self, job: str) -> str:
        """Return the key of a job."""
        return f"{self._tagged(job)}:job:{job}"

    def rate(self, name: str) -> str:
        """Return the key of a rate that several senders share."""
        return f"{self._tagged(name)}:rate:{name}"

    def due(self, shard: int, task: str | None = None, job: str | None = None) -> str:
        """Return the key of one shard's index by due time: of all tasks, of a task's, of a job's.

        The scripts write the same names, in ``shared.lua``.
        """
        index = f"{self.prefix}:{{{shard}}}:due"
        if task is not None:
            return f"{index}:task:{task}"
        return index if job is None else f"{index}:job:{job}"

    def complete_since(self) -> str:
        """Return the key that says since when the index is complete."""
        return f"{self.prefix}:{{0}}:complete-since"

    def _tagged(self, name: str) -> str:
        return f"{self.prefix}:{{{shard_of(name)}}}"

    def all_due(self, task: str | None = None, job: str | None = None) -> Iterator[str]:
        """Yield the keys of all shards' indexes."""
        return (self.due(shard, task, job) for shard in range(SHARDS))


def shard_of(name: str) -> int:
    """Return the number of the hash tag of a task id, a key or a job."""
    # A name may hold half of a surrogate pair, which strict UTF-8 refuses.
    return zlib.crc32(name.encode("utf-8", "surrogatepass")) % SHARDS
