"""Check-in, the ingest queue: puts what any AMQP client publishes with ``x-delay`` into the levels.

A delay above the levels' capacity goes to meditation, the overflow loop: it waits there for one
capacity and returns to check-in. Opens no connection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import amqp

from celery_rabbitdelay.exceptions import UnprocessableMessage
from celery_rabbitdelay.levels import headers as header_names
from celery_rabbitdelay.levels import wall_clock
from celery_rabbitdelay.levels.delay import NS_PER_MS, Due
from celery_rabbitdelay.levels.headers import DelayHeaders, shortened
from celery_rabbitdelay.levels.topology import Topology
from celery_rabbitdelay.modules import client_tasks
from celery_rabbitdelay.modules.allowed import where_in_words
from celery_rabbitdelay.modules.bounds import check_delay, check_depth
from celery_rabbitdelay.modules.forwarding import Outgoing, for_distribution, into_levels
from celery_rabbitdelay.publishing.message import WaitingMessage, headers_of
from celery_rabbitdelay.publishing.signature import SigningKeys


@dataclass(frozen=True)
class CheckIn:
    """Puts messages into the levels.

    Attributes:
        topology: The levels.
        allowed: Returns whether a message may go to an exchange (empty: the default one) with a
            routing key.
        signing_keys: What signs the messages that may go there, for distribution; None: nothing.
        trusts_clients: Whether a task may have callbacks, and all else that
            :mod:`.client_tasks` refuses.
        check_task: Returns whether a worker of Celery may take a message for a task; raises
            :class:`.UnprocessableMessage` if it could not read that. None: there are no workers.
    """

    topology: Topology
    allowed: Callable[[str, str], bool]
    signing_keys: SigningKeys | None = None
    trusts_clients: bool = False
    check_task: Callable[[WaitingMessage], bool] | None = None

    def admit(self, message: amqp.Message) -> None:
        """Remove from a received message the headers that no client may set.

        Neither check-in nor whatever reads ``undeliverable`` later then believes them.
        """
        info: Any = message.delivery_info
        headers = headers_of(message)
        if headers and info["exchange"] != self.topology.module_queues.meditated.name:
            kept = header_names.of_client(headers)
            if header_names.EXCHANGE in kept:
                # If check-in refuses it, this marks it as a client's; see ``never_accepted``.
                kept.setdefault(header_names.X_DELAY, 0)
            message.properties["application_headers"] = kept

    def receive(self, message: amqp.Message) -> Iterator[Outgoing]:
        """Return what to publish for a message.

        Raises:
            UnprocessableMessage: Its delay or destination is invalid, or not allowed.
        """
        info: Any = message.delivery_info
        headers = headers_of(message)
        check_depth(headers)
        header_names.refuse_sender_selected(headers)
        if info["exchange"] == self.topology.module_queues.meditated.name:
            yield self._after_meditation(message, headers, info["routing_key"])
        else:
            yield self._from_client(message, headers, info["routing_key"])

    def _after_meditation(
        self, message: amqp.Message, given: dict[str, Any], destination: str
    ) -> Outgoing:
        """Return a message whose routing key is its destination; see :meth:`.Topology.route`.

        A message of a later version waits on, unopened: every version has the same header for the
        due time and the same routing key in meditation.
        """
        waiting = WaitingMessage.unopened(message)
        due_ms = waiting.headers.due_ms
        if due_ms is None:
            raise UnprocessableMessage(
                "it comes from meditation, but its header "
                f"{header_names.DUE} is {shortened(given.get(header_names.DUE))}"
            )
        # Recompute the remaining delay from the due time: the message has also waited for this
        # module, not only in meditation.
        # Its delay was checked when it came in, maybe by another clock.
        due = Due(due_ms * NS_PER_MS, due_ms - wall_clock.ms(), is_instant=True)
        return into_levels(self.topology, waiting, due, destination)

    def _from_client(
        self, message: amqp.Message, given: dict[str, Any], routing_key: str
    ) -> Outgoing:
        content_type = message.properties.get("content_type")
        if str(content_type).startswith(header_names.OWN_CONTENT_TYPES):
            raise UnprocessableMessage("it is an envelope, which clients may not check in")
        why = header_names.later_version(given, content_type)
        if why is not None:
            raise UnprocessableMessage(why)
        exchange = header_names.client_exchange(given)
        self._check_destination(exchange, routing_key)
        delay_ms = header_names.client_delay_ms(given)
        given.pop(header_names.X_DELAY, None)
        sent = WaitingMessage.of(message, DelayHeaders(others=header_names.strip(given)))
        if not self.trusts_clients:
            sent = client_tasks.checked(sent)
        is_task = self.check_task is not None and self.check_task(sent)
        if not delay_ms:
            if is_task:
                sent = sent.saying(others={**sent.headers.others, header_names.CHECKED_IN: True})
            return Outgoing(exchange, routing_key, sent)
        check_delay(header_names.X_DELAY, delay_ms, delay_ms)
        due = Due(wall_clock.ns() + delay_ms * NS_PER_MS, delay_ms)
        return for_distribution(self.topology, sent, due, exchange, routing_key, self.signing_keys)

    def _check_destination(self, exchange: str, routing_key: str) -> None:
        if not exchange and not routing_key:
            raise UnprocessableMessage(
                f"it has no destination, neither a routing key nor {header_names.EXCHANGE}"
            )
        if not self.allowed(exchange, routing_key):
            raise UnprocessableMessage(
                f"check-in may not reach {where_in_words(exchange, routing_key)}: "
                "see rabbitdelay_checkin_allowed"
            )
