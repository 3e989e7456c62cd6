"""The rule of schedules in Python: what is noted when a message of a schedule arrives. Pure.

An instant is decided once, by the first of its messages that arrives and has the schedule's latest
order. Afterwards, only that message goes on: if it names the arrival that has decided, or if
RabbitMQ has redelivered it. If a later instant was decided, and it is not known which message has
decided this one, a message that has come before goes on: Redis may have lost the decision. What
follows a message is published and confirmed before that message is acknowledged. Healing publishes
the instant again that waits; an edit takes a later order. Neither decides anything.

``celery_rabbitdelay/schedules/lua`` has the same rule on the records in Redis.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from celery_rabbitdelay.levels.headers import Mark
from celery_rabbitdelay.registry.decision import Arrival

#: Of how many instants it is noted which message has decided them; in Redis, also of all those of
#: the last ten minutes. Of an older one, a message that has come before counts as that one.
WINNERS: Final = 8


class Winner(NamedTuple):
    """The arrival that has decided an instant.

    Attributes:
        instant: The instant.
        mark: The name of its message, and how often that had been put back.
        arrival: Its name.
    """

    instant: int
    mark: Mark
    arrival: str


class Record(NamedTuple):
    """What is noted about a schedule.

    Attributes:
        order: Grows with each edit, and with the deletion: of two messages, that of the greater one
            was sent later.
        begun: The order of the first put that Redis still knows of; 0 after a deletion. A message
            of a lower order may be of the same put, if Redis had lost it: the backlog.
        first: The earliest instant that this put or a later one began with: what is earlier is the
            backlog's.
        revision: Stands for what was put; empty once the schedule was deleted.
        ahead: The instant whose message waits; None if none follows.
        behind: The latest instant of the backlog that was decided; -1 if none was.
        done: The instant that was decided last, apart from the backlog; -1 if none was.
        winners: The arrivals that have decided the latest instants, the latest decision last.
        is_paused: Whether it is paused.
        is_deleted: Whether it was deleted; such a record only says that older messages do not run.
    """

    order: int
    begun: int
    first: int
    revision: str
    ahead: int | None
    behind: int = -1
    done: int = -1
    winners: tuple[Winner, ...] = ()
    is_paused: bool = False
    is_deleted: bool = False


class Message(NamedTuple):
    """A message of a schedule.

    Attributes:
        instant: The instant that it is about.
        order: The order of the edit that it was sent for.
        revision: The revision of that edit.
        mark: Its own name, which a redelivery keeps, and what is put back of it; how often it was
            put back; and the arrivals that did so after they had asked.
        redelivered: Whether RabbitMQ has delivered it before.
        in_doubt: Whether it was put back although RabbitMQ had redelivered it.
    """

    instant: int
    order: int
    revision: str
    mark: Mark
    redelivered: bool = False
    in_doubt: bool = False

    @property
    def name(self) -> str:
        """Its own name."""
        return self.mark.name

    @property
    def is_again(self) -> bool:
        """Whether RabbitMQ has redelivered it, or what was put back as it."""
        return self.redelivered or self.in_doubt

    def put_back(self, arrival: str) -> Message:
        """Return what an arrival of it puts back."""
        mark = self.mark.after(arrival)
        return self._replace(
            mark=mark._replace(generation=mark.generation + 1),
            redelivered=False,
            in_doubt=self.is_again,
        )

    def arrival(self, name: str) -> Arrival:
        """Return an arrival of it, as the registry's rule takes it."""
        asks = Arrival("task", 0, mark=self.mark, name=name)
        return asks._replace(redelivered=self.redelivered, in_doubt=self.in_doubt)


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
    is_backlog = record is not None and message.order < record.order
    if record is None or message.order > record.order:
        # Redis has lost the record, or an edit of it: the message has all that it takes.
        kept = record or Record(
            message.order, message.order, message.instant, message.revision, None
        )
        record = kept._replace(
            order=message.order, revision=message.revision, ahead=message.instant, is_deleted=False
        )
    elif record.is_deleted or (
        is_backlog
        and not (
            # Redis had lost the record, and the same was put again.
            message.order < record.begun
            and message.revision == record.revision
            and message.instant < record.first
        )
    ):
        return record, DROPPED
    order = message.order if is_backlog else record.order
    if is_backlog and following is not None and following >= record.first:
        following = None  # the put has sent it
    own = Winner(message.instant, message.mark._replace(former=()), arrival)
    asks = message.arrival(arrival)
    winner = next((each for each in record.winners if each.instant == message.instant), None)
    if winner is not None:
        if not asks.follows(winner.mark, winner.arrival):
            return _passed_over(record, message, following)
        winners = tuple(own if each is winner else each for each in record.winners)
        record = record._replace(winners=winners)
        if not is_backlog:
            following = record.ahead if message.instant == record.done else None
        elif message.instant != record.behind:
            following = None
        return record, Decided(True, following, record.is_paused, order)
    if message.instant <= record.behind if is_backlog else _is_passed(record, message):
        # No message of it was decided, or it is not known any more which one was: then one that has
        # come before counts as that.
        if asks.heir_of < 0 and not message.mark.former:
            return _passed_over(record, message, following)
        is_old = len(record.winners) >= WINNERS and message.instant < record.winners[0].instant
        if not is_old:  # Redis has lost the decision
            record = record._replace(winners=(*record.winners, own)[-WINNERS:])
        return record, Decided(True, None, record.is_paused, order)
    record = record._replace(winners=(*record.winners, own)[-WINNERS:])
    if is_backlog:
        record = record._replace(behind=message.instant)
    else:
        record = record._replace(done=message.instant, ahead=following)
    return record, Decided(True, following, record.is_paused, order)


def _is_passed(record: Record, message: Message) -> bool:
    """Return whether a later instant was decided, and this is not the one that is waited for.

    It may be, if Redis had lost the record.
    """
    return message.instant < record.done and message.instant != record.ahead


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
        return Record(order, order, first or 0, revision, first)
    return record._replace(
        order=order,
        first=record.first if first is None else min(record.first, first),
        revision=revision,
        ahead=first,
        is_paused=record.is_paused and not record.is_deleted,
        is_deleted=False,
    )


def delete(record: Record | None, order: int) -> Record:
    """Return what is noted when a schedule is deleted."""
    kept = record or Record(order, 0, 0, "", None)
    return kept._replace(
        order=order, begun=0, revision="", ahead=None, is_paused=False, is_deleted=True
    )


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
    winners = tuple(each for each in record.winners if each.instant != known.done)
    return record._replace(
        order=known.order,
        revision=known.revision,
        ahead=known.ahead,
        done=known.done,
        winners=(*winners, known.winners[-1])[-WINNERS:],
        is_deleted=False,
    )
