"""Every error that celery_rabbitdelay raises.

All of them are a :class:`RabbitDelayError`. Each also is the built-in or kombu error that callers
already catch at that place: a wrong delay is a :class:`ValueError` or :class:`TypeError`; if the
message cannot be sent as things are, it is a :class:`kombu.exceptions.OperationalError`, as
``apply_async`` documents it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final, NamedTuple, Self, cast, dataclass_transform

from kombu.exceptions import OperationalError


@dataclass_transform(eq_default=False)
class RabbitDelayError(Exception):
    """Base class of all errors of celery_rabbitdelay.

    An error is a dataclass: it is made with the values of its attributes.

    Attributes:
        may_have_arrived: Whether the broker may have the message although it has not confirmed it:
            it was written at least once, and neither refused nor returned. Then the task may run
            although it is regarded as not sent, and sending it again may make a copy. If False, the
            broker does not have it.
    """

    may_have_arrived: bool = False

    #: What the error says; its attributes are filled in.
    text: ClassVar = ""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclass(eq=False, repr=False)(cls)

    def __post_init__(self) -> None:
        # What it is pickled with: errors pass between processes.
        self.args = tuple(getattr(self, each.name) for each in fields(cast(Any, self)))

    def copy(self, may_have_arrived: bool) -> Self:
        """Return the same error of another message.

        Args:
            may_have_arrived: Whether the broker may have that one.
        """
        copied = type(self)(*self.args)
        copied.__cause__ = self.__cause__
        copied.may_have_arrived = may_have_arrived
        return copied

    def __str__(self) -> str:
        return self.text.format(self=self) if self.text else super().__str__()


class InvalidDelay(RabbitDelayError, ValueError):
    """The delay has no meaning as a length of time: not a number, infinite, or a naive datetime.

    Attributes:
        value: The delay as it was given.
        reason: What is wrong with it.
        what: The name of the argument: "delay", "eta" or "tolerance".
    """

    value: object
    reason: str
    what: str = "delay"

    text: ClassVar = "{self.what} {self.value!r}: {self.reason}"


class InvalidDelayType(InvalidDelay, TypeError):
    """The delay has an unsupported type, such as a string, a bool or a datetime."""


class DelayTooLong(RabbitDelayError, ValueError):
    """The delay is above what one pass through the levels can express.

    Attributes:
        delay_ms: The delay that was asked for, in milliseconds.
        capacity_ms: The largest delay of the layout, in milliseconds.
    """

    delay_ms: int
    capacity_ms: int

    def __str__(self) -> str:
        return (
            f"a delay of {self.delay_ms / 1000:,.3f} s is above the layout's capacity of "
            f"{self.capacity_ms / 1000:,.3f} s: choose a shorter delay, or a layout with more "
            'levels; or add "check-in" to rabbitdelay_modules: it then waits in the overflow loop'
        )


class InvalidLayout(RabbitDelayError, ValueError):
    """The layout is invalid.

    One count of a level must equal the next lower level's base times one count of that level, and
    TTLs and routing keys must stay within RabbitMQ's bounds.

    Attributes:
        reason: What is wrong with it.
    """

    reason: str


class InvalidSetting(RabbitDelayError, ValueError):
    """An unknown ``rabbitdelay_*`` key, or an invalid value.

    Attributes:
        key: The setting's name.
        value: The value that was found.
        takes: What the setting takes.
    """

    key: str
    value: object
    takes: str

    text: ClassVar = "{self.key} = {self.value!r}: {self.takes}"


class InvalidSigningKey(RabbitDelayError, ValueError):
    """A key for signatures is missing or too short. The error does not show it.

    Attributes:
        reason: What is wrong, and what to do.
    """

    reason: str

    text: ClassVar = "a signing key {self.reason}"


class InvalidSchedule(RabbitDelayError, ValueError):
    """A schedule says nothing that can be due, or nothing that can be sent.

    Attributes:
        value: The rule, the name or the arguments that were given.
        reason: Why it is refused.
    """

    value: object
    reason: str

    text: ClassVar = "the schedule {self.value!r}: {self.reason}"


class UnknownOption(RabbitDelayError, TypeError):
    """A delayed task has an option that is unknown or not allowed here.

    Attributes:
        name: The option's name.
        value: The value that was given.
        reason: What is wrong with it.
    """

    name: str
    value: object
    reason: str = "this version does not know the option, leave it out"

    text: ClassVar = "{self.name} = {self.value!r}: {self.reason}"


class LayoutConflict(RabbitDelayError, OperationalError):
    """Something else than these levels is declared on the broker under the same prefix.

    Attributes:
        prefix: The prefix that both claim.
        reply: What the broker answered.
        advice: In what the two may differ, and what to do about it.
    """

    prefix: str
    reply: str
    advice: str = "use another rabbitdelay_prefix for this one"

    text: ClassVar = (
        "the broker holds other levels under the prefix {self.prefix!r}: {self.advice}. "
        "The broker said: {self.reply}"
    )


class TopologyIncomplete(RabbitDelayError, OperationalError):
    """Exchanges or queues of the layout are missing on the broker.

    Attributes:
        prefix: The prefix of the layout.
        missing: The names of what is missing.
    """

    prefix: str
    missing: tuple[str, ...]

    def __str__(self) -> str:
        shown = ", ".join(self.missing[:5])
        more = f" and {len(self.missing) - 5} more" if len(self.missing) > 5 else ""
        return (
            f"the layout under the prefix {self.prefix!r} is incomplete on the broker, missing: "
            f"{shown}{more}. Run `celery rabbitdelay declare --queues`; or declare the levels with "
            "celery_rabbitdelay.kombu.declare, and declare the queues of the tasks and bind them "
            'with bind_destination; or set rabbitdelay_declare = "auto"'
        )


class TopologyNotEmpty(RabbitDelayError):
    """Messages still wait in a topology that is to be deleted.

    Attributes:
        prefix: Its prefix, with which all its names begin.
        waiting: How many messages wait, by the name of their queue.
    """

    prefix: str
    waiting: Mapping[str, int]

    def __str__(self) -> str:
        return (
            f"{sum(self.waiting.values())} messages still wait in {len(self.waiting)} queues under "
            f"the prefix {self.prefix!r}, for example in {next(iter(self.waiting))}: wait until "
            "they are due and the queues of their tasks take them, or delete with force=True to "
            "lose them"
        )


class TopologyInUse(RabbitDelayError):
    """Queues of a topology that is to be deleted have consumers.

    A worker may hold messages that it has received and not yet published; the broker does not say
    how many. They are lost with their queue.

    Attributes:
        prefix: Its prefix, with which all its names begin.
        consumers: How many consumers there are, by the name of their queue.
    """

    prefix: str
    consumers: Mapping[str, int]

    def __str__(self) -> str:
        return (
            f"{sum(self.consumers.values())} consumers still take messages from "
            f"{', '.join(self.consumers)} under the prefix {self.prefix!r}: stop the workers, or "
            "start them with --rabbitdelay-modules= meanwhile; delete with force=True loses what "
            "they hold"
        )


class SameTopology(RabbitDelayError, ValueError):
    """Messages are to be moved to the place where they are.

    Attributes:
        prefix: The prefix of both topologies.
    """

    prefix: str

    text: ClassVar = (
        "source and target have the same prefix {self.prefix!r} on the same broker, and so "
        "the same queues. Give the new levels another rabbitdelay_prefix, and name the old one "
        "as the source"
    )


class NeedsDistribution(RabbitDelayError, OperationalError, NotImplementedError):
    """The message needs distribution, which ``rabbitdelay_modules`` does not list.

    Sending it again does not help. It is an :class:`~kombu.exceptions.OperationalError` because
    callers and Celery itself expect that one when a task, or its callback, cannot be sent.

    Attributes:
        what: What the message asks for.
    """

    what: str

    text: ClassVar = (
        "{self.what} cannot be delayed: the levels hand a message to one queue, with a "
        "priority of at most 4. Send it to one queue of task_queues, with such a priority; or add "
        '"distribution" to rabbitdelay_modules; or call send_many without envelopes=True; or set '
        "rabbitdelay=False on the task to keep Celery's own behavior"
    )


class MessageTooLarge(RabbitDelayError, OperationalError, ValueError):
    """The message is larger than what workers take from a module, or decompress.

    Nothing was sent, and sending it again does not help. It is an
    :class:`~kombu.exceptions.OperationalError` because callers and Celery itself expect that one
    when a task, or its callback, cannot be sent.

    Attributes:
        size: The bytes of the message's body.
        bound: ``rabbitdelay_max_message_bytes``.
    """

    size: int
    bound: int

    text: ClassVar = (
        "a body of {self.size:,} bytes is larger than rabbitdelay_max_message_bytes, "
        "{self.bound:,}: send a reference instead of the content; or send it without compression "
        "to one queue of task_queues, with a priority of at most 4 and a delay within the levels' "
        "capacity; or raise the setting on workers and producers"
    )


class PublishError(RabbitDelayError, OperationalError):
    """The broker did not take responsibility for a message; it must be regarded as not sent.

    ``may_have_arrived`` says whether the broker may have the message all the same. It depends on
    all attempts: an error that says that the broker refused the message may follow an attempt whose
    connection was lost.

    Attributes:
        exchange: The exchange that the message was published to.
        routing_key: Its routing key.
        reason: What went wrong.
    """

    exchange: str
    routing_key: str
    reason: str

    text: ClassVar = "{self.exchange!r} with key {self.routing_key!r}: {self.reason}"


class MessageNacked(PublishError):
    """The broker nacked the message (``basic.nack``): a queue was full or its leader away.

    It may take the same message later. The broker does not have it, unless an attempt before ended
    with a lost connection.
    """


class MessageRefused(PublishError):
    """The broker closed the channel because of the message, and will do so each time.

    The message is larger than ``max_message_size``, has an invalid property, or the user may not
    write to the exchange; the reason is the broker's. Sending the same message again does not help.
    The broker does not have it, unless an attempt before ended with a lost connection.
    """


class MessageReturned(PublishError):
    """No queue takes the message (``basic.return``), or its exchange does not exist.

    The broker does not have it, unless an attempt before ended with a lost connection.
    """


class DeclarationRefused(PublishError):
    """The broker refused to declare what the message needs; the reason is the broker's.

    Usually the destination's queue exists with other arguments than the application gives it, the
    user lacks the permission, or nobody has declared an exclusive queue. If the reason may pass,
    because the node of a classic queue is down, the declaration is repeated like a lost connection.
    The message was not written, unless an attempt before ended with a lost connection.
    """


class MissingPermission(NamedTuple):
    """A permission that a user of RabbitMQ lacks.

    Attributes:
        user: The user.
        permission: ``configure``, ``write`` or ``read``. RabbitMQ 3.10 does not say which; if the
            method needs several, they are all named: "configure or read".
        kind: ``queue`` or ``exchange``.
        name: The name of the queue or exchange.
        virtual_host: The virtual host.
        topic: The routing or binding key that a topic permission does not allow; None if no topic
            permission is lacking.
    """

    user: str
    permission: str
    kind: str
    name: str
    virtual_host: str
    topic: str | None = None

    def __str__(self) -> str:
        where = f"{self.kind} {self.name!r} in the virtual host {self.virtual_host!r}"
        what, command = f"permission {self.permission}", "set_permissions"
        if self.topic is not None:
            what, command = f"topic {what} for the key {self.topic!r}", "set_topic_permissions"
        return f"the user {self.user!r} lacks the {what} on the {where}: see rabbitmqctl {command}"


class PermissionMissing(RabbitDelayError, OperationalError):
    """The broker's user lacks a permission.

    ``celery rabbitdelay permissions`` prints the permissions that each role needs.

    Attributes:
        permission: The permission, the resource and the user.
    """

    permission: MissingPermission

    text: ClassVar = "{self.permission}"


class PublishNotPermitted(PublishError, PermissionMissing):
    """The user lacks a permission that the message needs.

    It is a :class:`MessageNotPermitted` or a :class:`DeclarationNotPermitted`. Nothing was sent,
    unless an attempt before ended with a lost connection: nothing was written by this one.
    """


class MessageNotPermitted(PublishNotPermitted, MessageRefused):
    """The user may not write to the exchange, or not with this routing key.

    ``permission`` says which permission on which exchange the user lacks.
    """


class DeclarationNotPermitted(PublishNotPermitted, DeclarationRefused):
    """The user may not declare or bind what the message needs.

    ``permission`` says which permission on which queue or exchange the user lacks.
    """


class ConfirmTimeout(PublishError):
    """The broker did not confirm in time; it may have the message, if this was written."""


class ConnectionBlocked(PublishError):
    """The broker blocks publishers (memory or disk alarm) and did not unblock in time.

    The broker says so only when it gets a message, and takes this one once the alarm is over, even
    if the connection is closed by then. So it may have the message, if this was written.
    """


class ConnectionLost(PublishError):
    """The connection could not be opened, was refused, or broke before the confirm.

    Raised after all permitted attempts, or at once if another attempt cannot help. The broker may
    have the message, if this was written at one of them.
    """


class NoPublisherFree(RabbitDelayError, OperationalError):
    """No publisher of the pool became free within the timeout; nothing was sent.

    Attributes:
        limit: How many publishers the pool has.
        timeout: The timeout, in seconds.
    """

    limit: int | None
    timeout: float | None

    text: ClassVar = (
        "all {self.limit} publishers were in use for {self.timeout} s: "
        "raise broker_pool_limit, or delay fewer tasks at the same time"
    )


class InvalidEnvelope(RabbitDelayError, ValueError):
    """An envelope cannot be read or written, or exceeds a size limit.

    Attributes:
        reason: What is wrong with it.
    """

    reason: str


class UnprocessableMessage(RabbitDelayError):
    """A module cannot process a message; it goes to ``undeliverable``.

    Attributes:
        reason: Why, in words.
    """

    reason: str


class LaterVersion(UnprocessableMessage):
    """Only a later version of this package can read a message.

    A module puts it back into the levels, for a worker of that version.
    """


class InvalidDestination(RabbitDelayError, ValueError):
    """Undeliverable messages cannot be redirected to this queue.

    Attributes:
        queue: The queue's name, as it was given.
        reason: What is wrong with it, and what to do.
    """

    queue: str
    reason: str

    text: ClassVar = "the queue {self.queue!r} {self.reason}"


class RowsNotConfirmed(RabbitDelayError, OperationalError):
    """Some rows of a ``send_many`` were not confirmed; all others are.

    Attributes:
        report: What was sent; see :class:`celery_rabbitdelay.Report`.
        errors: The error of each row that was taken and not confirmed, by the row's number, from 0,
            in the rows' order.
        uncertain: The numbers of those of these rows that the broker may have all the same. It does
            not have the others, so they can be sent again without making copies.
        rest: The number of the first row that was not taken, None if all rows were. Unless the
            iterable raised, this row was already yielded by the generator, but not sent.
    """

    def __init__(self, report: Any, errors: Mapping[int, Exception], rest: int | None) -> None:
        super().__init__(report, errors, rest)
        self.report = report
        self.errors = dict(sorted(errors.items()))
        self.rest = rest

        self.uncertain = tuple(row for row, each in self.errors.items() if _may_have_arrived(each))
        self.may_have_arrived = bool(self.uncertain)

    def __str__(self) -> str:
        # Mostly they are all the same.
        first = {str(error): row for row, error in reversed(list(self.errors.items())[:3])}
        shown = ", ".join(f"row {row}: {text}" for text, row in reversed(first.items()))
        more = f"; those from row {self.rest} on were not taken" if self.rest is not None else ""
        return f"{len(self.errors)} rows were not confirmed ({shown}){more}"


class TasksNotConfirmed(RabbitDelayError, OperationalError):
    """Some tasks that were sent in a ``pipeline()``, or a group, were not confirmed; others are.

    Attributes:
        errors: The error of each task that is not confirmed, by its id, in the order in which they
            failed.
        uncertain: The ids of the tasks that the broker may have nevertheless. It does not have the
            other ones, so sending those again makes no copies.
    """

    def __init__(self, errors: Mapping[str, Exception]) -> None:
        super().__init__(errors)
        self.errors = dict(errors)
        self.uncertain = tuple(each for each, why in errors.items() if _may_have_arrived(why))
        self.may_have_arrived = bool(self.uncertain)

    def __str__(self) -> str:
        shown = ", ".join(f"{each}: {why}" for each, why in list(self.errors.items())[:3])
        return f"{len(self.errors)} tasks were not confirmed ({shown})"


class InvalidRow(RabbitDelayError, TypeError):
    """Invalid row of ``send_many``.

    Attributes:
        row: The row.
        reason: What is wrong with it.
    """

    row: object
    reason: str

    text: ClassVar = "row {self.row!r}: {self.reason}"


class InvalidOption(RabbitDelayError, ValueError):
    """An option of Spark's format ``rabbitdelay`` is unknown, missing or invalid.

    Attributes:
        name: The option's name.
        value: Its value; None if it is missing, or secret.
        takes: The values that are accepted.
    """

    name: str
    value: str | None
    takes: str

    def __str__(self) -> str:
        value = "" if self.value is None else f" = {self.value!r}"
        return f"option {self.name}{value}: {self.takes}"


class InvalidColumn(RabbitDelayError, TypeError):
    """A column of a DataFrame that becomes tasks is missing, unknown or of a wrong type.

    Attributes:
        name: The column's name.
        type: Its type, as Spark writes it; None if it is missing.
        takes: The types or columns that are accepted.
    """

    name: str
    type: str | None
    takes: str

    def __str__(self) -> str:
        shown = "" if self.type is None else f" ({self.type})"
        return f"column {self.name}{shown}: {self.takes}"


class ReadTooLong(RabbitDelayError, OperationalError):
    """Reading the undeliverable messages took too long; the broker may have taken some back.

    Attributes:
        messages: How many messages were read.
        seconds: How long they were held.
    """

    messages: int
    seconds: float

    text: ClassVar = (
        "{self.messages} undeliverable messages were read in {self.seconds:.0f} s, and the "
        "broker may have taken them back (consumer_timeout); read fewer, with a limit"
    )


class AdditionMissing(RabbitDelayError, AttributeError):
    """A setting, an option, a method or a command belongs to a part that is not installed.

    Attributes:
        what: What was needed, as ``module:name``.
        addition: The part: the name of its folder in this package.
    """

    what: str
    addition: str

    text: ClassVar = (
        "{self.what} is needed, and this installation of celery_rabbitdelay has no folder "
        "{self.addition!r}: install the whole package"
    )


class RegistryRequired(RabbitDelayError, TypeError):
    """An option or a call needs the registry, and ``rabbitdelay_registry_url`` is not set.

    Attributes:
        what: The option, with its value, or the call.
    """

    what: str

    text: ClassVar = (
        "{self.what} needs the registry: set rabbitdelay_registry_url to the URL of a Redis"
    )


class RegistryUnavailable(RabbitDelayError, OperationalError):
    """Redis did not answer in time, or refused.

    A send that raises it has published nothing.

    Attributes:
        reason: What went wrong.
    """

    reason: str

    text: ClassVar = "the registry cannot be used: {self.reason}"


class NotRecorded(RabbitDelayError, NotImplementedError):
    """A test asks for something that ``celery_rabbitdelay.testing.recorded`` does not imitate.

    Attributes:
        what: What it asks for.
    """

    what: str

    text: ClassVar = (
        "recorded() does not imitate {self.what}: use celery_rabbitdelay.testing.travel, which "
        "runs the test against a real RabbitMQ"
    )


class NotTracked(RabbitDelayError, ValueError):
    """A task is to run earlier, and its message is not in the registry, so it cannot be sent anew.

    Attributes:
        task_id: The task's id.
    """

    task_id: str

    text: ClassVar = (
        "task {self.task_id} cannot run earlier: its message waits in the broker and is not "
        "tracked. Send it with track=True, or cancel it and send it under another id"
    )


class JobClosed(RabbitDelayError, ValueError):
    """A job is not open, and takes no tasks and no decision that differs from its own.

    Attributes:
        job: The job.
        state: ``committed``, ``aborted``, ``open`` (it was to be opened), or ``unknown``.
    """

    job: str
    state: str

    def __str__(self) -> str:
        way_out = {
            "unknown": "open it first, with app.rabbitdelay.open_job or app.rabbitdelay.job",
            "open": "commit or abort it, or choose another name",
        }
        return f"job {self.job!r} is {self.state}: {way_out.get(self.state, 'open another one')}"


class InvalidManagementURL(RabbitDelayError, ValueError):
    """The URL of RabbitMQ's management API is malformed.

    Attributes:
        url: The URL, without its password.
    """

    url: str

    text: ClassVar = "{self.url!r} is not a URL such as http://host:15672"


class ManagementUnavailable(RabbitDelayError, OperationalError):
    """RabbitMQ's management API cannot be reached, or refuses to answer.

    Attributes:
        url: Its URL, without user and password.
        reason: What went wrong.
        status: The status of HTTP; None without an answer.
    """

    url: str
    reason: str
    status: int | None = None

    text: ClassVar = (
        "the management API {self.url} cannot be used: {self.reason}. Enable it on the broker "
        "(rabbitmq-plugins enable rabbitmq_management), and name its URL and a user with the "
        "tag 'monitoring' with --management or RABBITDELAY_MANAGEMENT_URL"
    )


def _may_have_arrived(error: Exception) -> bool:
    # Celery's own publishing does not say.
    unknown = isinstance(error, OperationalError)
    return error.may_have_arrived if isinstance(error, RabbitDelayError) else unknown


#: Errors of publishing after which another attempt may succeed.
TEMPORARY_ERRORS: Final = (
    MessageNacked,
    ConfirmTimeout,
    ConnectionBlocked,
    ConnectionLost,
    NoPublisherFree,
)
