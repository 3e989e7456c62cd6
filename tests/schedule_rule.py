"""The rule of schedules in Python: what is noted when a message of a schedule arrives. Pure.

An instant is decided once, by the first of its messages that arrives and has the schedule's latest
order. What follows it is published and confirmed before that message is acknowledged. Healing
publishes the instant again that waits; an edit takes a later order. Neither decides anything.

``celery_rabbitdelay/schedules/lua`` has the same rule on the records in Redis.
"""

from __future__ import annotations

from typing import Final, NamedTuple

#: Of how many instants it is noted which message has decided them. Of an older one, a message that
#: has come before counts as that one.
WINNERS: Final = 8


class Winner(NamedTuple):
    """The message that has decided an instant.

    Attributes:
        instant: The instant.
        name: The name of the message.
        turns: How often it had been put back.
        arrival: The name of its arrival.
    """

    instant: int
    name: str
    turns: int
    arrival: str


class Record(NamedTuple):
    """What is noted about a schedule.

    Attributes:
        order: Grows with each edit, and with the deletion: of two messages, that of the greater one
            was sent later.
        begun: The order of the first put that Redis still knows of; 0 after a deletion. A message
            of a lower order may be of the same put, if Redis had lost it.
        revision: Stands for what was put; empty once the schedule was deleted.
        ahead: The instant whose message waits; None if none follows.
        winners: The messages that have decided the latest instants, the latest decision last.
        is_paused: Whether it is paused.
        is_deleted: Whether it was deleted; such a record only says that older messages do not run.
    """

    order: int
    begun: int
    revision: str
    ahead: int | None
    winners: tuple[Winner, ...] = ()
    is_paused: bool = False
    is_deleted: bool = False

    @property
    def done(self) -> int:
        """The instant that was decided last; -1 if none was."""
        return self.winners[-1].instant if self.winners else -1


class Message(NamedTuple):
    """A message of a schedule.

    Attributes:
        instant: The instant that it is about.
        order: The order of the edit that it was sent for.
        revision: The revision of that edit.
        name: Its own name, which a redelivery keeps, and what is put back of it.
        turns: How often it was put back.
        redelivered: Whether RabbitMQ has delivered it before.
    """

    instant: int
    order: int
    revision: str
    name: str
    turns: int = 0
    redelivered: bool = False


class Decided(NamedTuple):
    """What becomes of a message.

    Attributes:
        goes_on: Whether it goes on: it runs, or is left out. Otherwise it is dropped.
        following: The instant to publish before that, also if it is dropped; None if none follows,
            or it was published before.
        is_paused: Whether the schedule is paused.
        order: The order of the message of ``following``.
    """

    goes_on: bool
    following: int | None = None
    is_paused: bool = False
    order: int = 0


DROPPED: Final = Decided(goes_on=False)


def decide(
    record: Record | None, message: Message, following: int | None, arrival: str
) -> tuple[Record | None, Decided]:
    """Return what is noted when a message arrives, and what becomes of it.

    Args:
        record: What was noted; None if Redis knows nothing of the schedule.
        message: The message.
        following: The instant that follows it, by its own definition.
        arrival: The name of this arrival; the same if the question is asked again.
    """
    if record is None or message.order > record.order:
        # Redis has lost the record, or an edit of it: the message has all that it takes.
        kept = record or Record(message.order, message.order, message.revision, None)
        record = kept._replace(
            order=message.order,
            revision=message.revision,
            ahead=message.instant,
            is_deleted=False,
        )
    elif record.is_deleted or (
        message.order < record.order
        and not (
            # The backlog: Redis had lost the record, and the same was put again. What is later than
            # the instant ahead comes in its turn.
            message.order < record.begun
            and message.revision == record.revision
            and (record.ahead is None or message.instant <= record.ahead)
        )
    ):
        return record, DROPPED
    is_backlog = message.order < record.order
    own = Winner(message.instant, message.name, message.turns, arrival)
    winner = next((each for each in record.winners if each.instant == message.instant), None)
    if winner is not None:
        is_same = message.redelivered or arrival == winner.arrival
        if (
            own.name != winner.name
            or own.turns < winner.turns
            or (own.turns == winner.turns and not is_same)
        ):
            return _passed_over(record, message, following)
        following = record.ahead if message.instant == record.done else None
        winners = tuple(own if each is winner else each for each in record.winners)
    elif message.instant < record.done and not (
        # Redis had lost the record: what has decided a later instant was sent for another edit.
        (is_backlog or message.instant == record.ahead) and len(record.winners) < WINNERS
    ):
        # It was left out as too old, or it is forgotten which message has decided it: then one that
        # has come before counts as that.
        is_forgotten = (
            len(record.winners) == WINNERS and message.instant < record.winners[0].instant
        )
        if not (is_forgotten and (message.redelivered or message.turns > 0)):
            return _passed_over(record, message, following)
        return record, Decided(True, None, record.is_paused, record.order)
    else:
        if is_backlog and following != record.ahead:
            # What was put again is further ahead: it waits until the backlog comes to it.
            record = record._replace(order=record.order + 1)
        winners = (*record.winners, own)[-WINNERS:]
        record = record._replace(ahead=following)
    record = record._replace(winners=winners)
    return record, Decided(True, following, record.is_paused, record.order)


def _passed_over(record: Record, message: Message, following: int | None) -> tuple[Record, Decided]:
    """Drop a message of an instant that was decided; if that was ahead, what follows it is."""
    if record.ahead != message.instant:
        return record, DROPPED
    return record._replace(ahead=following), Decided(
        False, following, record.is_paused, record.order
    )


def since(record: Record | None, now: int) -> int:
    """Return the instant behind which an edit begins: what is due and has not come still comes."""
    if record is None:
        return now
    is_due = not record.is_deleted and record.ahead is not None and record.ahead <= now
    begin = record.ahead - 1 if is_due and record.ahead is not None else now
    return max(begin, record.done)


def edit(record: Record | None, order: int, revision: str, first: int | None) -> Record:
    """Return what is noted when a schedule is put; ``first`` is the first instant behind `since`.

    In one step with :func:`since`: an edit during which the record has changed begins again.
    """
    if record is None:
        return Record(order, order, revision, first)
    is_paused = record.is_paused and not record.is_deleted
    return record._replace(
        order=order, revision=revision, ahead=first, is_paused=is_paused, is_deleted=False
    )


def delete(record: Record | None, order: int) -> Record:
    """Return what is noted when a schedule is deleted."""
    winners = () if record is None else record.winners
    return Record(order, 0, "", None, winners, is_deleted=True)


def again(record: Record | None, known: Record) -> Record | None:
    """Return what is noted when a worker remembers more than Redis, which went back in time.

    Args:
        record: What is noted.
        known: What the worker remembers: what it has decided last, with that one winner.
    """
    if record is None or record.order > known.order:
        return record
    if record.order == known.order and record.done >= known.done:
        return record
    winners = tuple(each for each in record.winners if each.instant < known.done)
    return record._replace(
        order=known.order,
        revision=known.revision,
        ahead=known.ahead,
        winners=(*winners, known.winners[-1])[-WINNERS:],
        is_deleted=False,
    )
