"""A mail gateway that refuses a mail now and then, and sends none twice under the same key."""

from __future__ import annotations

import hashlib
import time
from typing import Final

from redis import Redis

__all__ = ["REFUSED_PERCENT", "MailGateway", "MailRefused", "refuses"]

#: How many of a hundred attempts the gateway refuses.
REFUSED_PERCENT: Final = 10

#: Seconds between the mail's going out and the gateway's answer. A worker that is killed in
#: between does not know that the mail is out, and that is what the idempotency key is for.
ANSWER_TIME: Final = 0.01

# The check of the key and the sending are one step of Redis: a worker that is killed leaves either
# nothing, and the mail goes out when the task is redelivered, or a mail together with its key. A
# key that were claimed first, in a step of its own, would lose the mail of a worker killed between.
_SEND_ONCE: Final = """
if redis.call('SADD', KEYS[1], ARGV[1]) == 0 then
    return 0
end
redis.call('HINCRBY', KEYS[2], ARGV[2], 1)
return 1
"""


class MailRefused(Exception):
    """The gateway did not take the mail; try again later."""


class MailGateway:
    """The gateway; its keys and its outbox are in Redis, which every worker process reaches.

    Args:
        redis: Where; a client that answers in text.
        prefix: The beginning of its keys.
    """

    def __init__(self, redis: Redis, prefix: str) -> None:
        self._redis = redis
        self._keys = f"{prefix}:gateway:idempotency-keys"
        self._outbox = f"{prefix}:gateway:outbox"
        self._send_once = redis.register_script(_SEND_ONCE)

    def send(self, order_id: str, *, idempotency_key: str, attempt: int) -> bool:
        """Send the mail about an order, unless one went out under the same key.

        Args:
            order_id: What the mail is about.
            idempotency_key: As real mail providers take it: the same for all attempts at a mail.
            attempt: The first is 0. Only for :func:`refuses`; a real gateway has moods instead.

        Returns:
            Whether a mail went out; False when one had gone out before.

        Raises:
            MailRefused: The gateway has one of its moods.
        """
        if refuses(order_id, attempt):
            raise MailRefused(f"order {order_id}, attempt {attempt}: try again later")
        went_out = self._send_once(
            keys=[self._keys, self._outbox], args=[idempotency_key, order_id]
        )
        time.sleep(ANSWER_TIME)
        return bool(went_out)

    def orders_mailed(self) -> int:
        """For how many orders a mail went out."""
        return self._redis.hlen(self._outbox)

    def mails(self) -> dict[str, int]:
        """How many mails went out, by order; without the key it could be more than one."""
        mails = self._redis.hgetall(self._outbox)
        return {str(order_id): int(count) for order_id, count in mails.items()}


def refuses(order_id: str, attempt: int) -> bool:
    """Whether the gateway refuses an attempt: the same ones in every run."""
    digest = hashlib.blake2b(f"{order_id}/{attempt}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) % 100 < REFUSED_PERCENT
