"""The differences between versions of RabbitMQ: quirks, workarounds, and affected versions.

No other file compares versions, except with :data:`OLDEST`. Quirks without a source were measured
on RabbitMQ 3.10.8, 4.0.5 and 4.3.6. To add a quirk, define it here. Code that depends on the
version calls ``NAME.is_in(version)``; where all versions are treated alike, a comment names the
quirk.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple, TypeAlias

#: The known numbers of a version, such as (3, 10, 8).
Version: TypeAlias = tuple[int, ...]

#: The oldest series that the tests run on.
OLDEST: Final[Version] = (3, 10)


class Quirk(NamedTuple):
    """The versions that behave differently.

    Attributes:
        first: The first version with the quirk; empty if all earlier versions have the quirk.
        last: The last version with the quirk, or its series; None if the newest version has the
            quirk.
    """

    first: Version = ()
    last: Version | None = None

    def is_in(self, version: Version) -> bool:
        """Return whether a version has the quirk."""
        last = self.last
        return self.first <= version and (last is None or version[: len(last)] <= last)


#: At-least-once dead-lettering needs the feature flag stream_queue. verify reports its absence.
#: Source: https://www.rabbitmq.com/docs/quorum-queues#activating-at-least-once-dead-lettering
DEAD_LETTERING_FLAG: Final = Quirk(last=(3, 10))

#: At-least-once dead-lettering stops when the replicas of a queue change. verify warns. Source:
#: https://github.com/rabbitmq/rabbitmq-server/pull/16652
STUCK_DEAD_LETTERING: Final = Quirk(first=(4, 3, 0), last=(4, 3, 2))

#: A consumer of a quorum queue fails if it starts again under the same tag while it has messages.
#: This package's consumers never reuse a tag.
SAME_CONSUMER_TAG: Final = Quirk(last=(3,))

#: basic.nack changes the order of requeued messages; closing the channel keeps the order. Messages
#: that were only read are requeued by closing the channel.
ORDER_OF_REQUEUED: Final = Quirk(last=(3,))

#: basic.reject and a closed channel count towards a delivery limit, basic.nack does not.
#: Messages that are not processed are therefore requeued with basic.nack. Source:
#: https://www.rabbitmq.com/docs/quorum-queues#poison-message-handling
ONLY_REJECT_COUNTS: Final = Quirk(first=(4, 3))

#: Quorum queues dead-letter a message after 20 deliveries by default, task queues drop it. The
#: levels set a limit that is never reached. Source:
#: https://www.rabbitmq.com/docs/quorum-queues#position-in-queue
DELIVERY_LIMIT: Final = Quirk(first=(4, 0))

#: Priorities above 4 form a separate band; a message in this band blocks the other messages of a
#: level. Higher priorities wait in a header, and distribution restores them. Source:
#: https://www.rabbitmq.com/docs/quorum-queues#priorities
TWO_PRIORITIES: Final = Quirk(first=(4, 0), last=(4, 2))

#: A passive declaration needs one of the three permissions; earlier versions require no permission.
#: Counts that the user may not read are left out.
PASSIVE_PERMISSION: Final = Quirk(first=(4, 3))

#: ACCESS_REFUSED does not say which permission is missing; the refused method shows it.
UNNAMED_PERMISSION: Final = Quirk(last=(3,))

#: The management API does not list the bindings of a queue whose node is down. verify expects
#: no binding of such a queue.
UNLISTED_BINDINGS: Final = Quirk(last=(4, 2))


def version_of(text: str) -> Version:
    """Return the numbers of a version as the broker writes it: ``3.10.8``, ``4.3.0-rc.1``."""
    return tuple(map(int, re.findall(r"\d+", text)[:3]))
