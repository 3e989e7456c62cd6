"""Every error that celery_rabbitdelay raises.

All errors are subclasses of :class:`RabbitDelayError`. Most are also subclasses of the built-in or
kombu error that callers already catch: an invalid delay is a :class:`ValueError` or a
:class:`TypeError`, and a failed send is a :class:`kombu.exceptions.OperationalError`, as
``apply_async`` documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final, NamedTuple, Self, cast, dataclass_transform

from kombu.exceptions import OperationalError

__all__ = [
    "AdditionMissing",
    "ConfirmTimeout",
    "ConnectionBlocked",
    "ConnectionLost",
    "DeclarationNotPermitted",
    "DeclarationRefused",
    "DelayTooLong",
    "InvalidColumn",
    "InvalidDelay",
    "InvalidDelayType",
    "InvalidDestination",
    "InvalidEnvelope",
    "InvalidLayout",
    "InvalidManagementURL",
    "InvalidOption",
    "InvalidRow",
    "InvalidSchedule",
    "InvalidSearch",
    "InvalidSetting",
    "InvalidSigningKey",
    "JobClosed",
    "LaterVersion",
    "LayoutConflict",
    "ManagementUnavailable",
    "MessageNacked",
    "MessageNotPermitted",
    "MessageRefused",
    "MessageReturned",
    "MessageTooLarge",
    "NeedsDistribution",
    "NoPublisherFree",
    "NotRecorded",
    "NotTracked",
    "PermissionMissing",
    "PublishError",
    "PublishNotPermitted",
    "RabbitDelayError",
    "ReadTooLong",
    "RegistryRequired",
    "RegistryUnavailable",
    "RowsNotConfirmed",
    "SameTopology",
    "TasksNotConfirmed",
    "TopologyInUse",
    "TopologyIncomplete",
    "TopologyNotEmpty",
    "UnknownOption",
    "UnprocessableMessage",
]


@dataclass_transform(eq_default=False)
class RabbitDelayError(Exception):
    """Base class of all errors of celery_rabbitdelay.

    An error is a dataclass; its ``args`` are the values of its attributes.

    Attributes:
        may_have_arrived: Whether the broker may have the message although it sent no confirm: the
            message was written at least once, and neither refused nor returned. The task may then
            run although the send failed, and another send may duplicate the task. If False, the
            broker does not have the message.
    """

    may_have_arrived: bool = False

    #: The error's text, a format string with the attributes of ``self``.
    text: ClassVar[str] = ""

    #: The page of the documentation about the error, an argument of the class statement. A note
    #: names the page below the error's text in a traceback.
    page: ClassVar[str] = "how-to/troubleshooting"

    def __init_subclass__(cls, page: str = "") -> None:
        super().__init_subclass__()
        if page:
            cls.page = page
        dataclass(eq=False, repr=False)(cls)

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.add_note(f"See {self.page} in the documentation of celery_rabbitdelay.")

    def __post_init__(self) -> None:
        # Pickle passes these to the class: errors travel between processes.
        values = (getattr(self, each.name) for each in fields(cast(Any, self)))
        RabbitDelayError.__init__(self, *values)

    def copy(self, may_have_arrived: bool) -> Self:
        """Return the same error for another message.

        Args:
            may_have_arrived: Whether the broker may have the other message.
        """
        copied = type(self)(*self.args)
        copied.__cause__ = self.__cause__
        copied.may_have_arrived = may_have_arrived
        return copied

    def __str__(self) -> str:
        return self.text.format(self=self) if self.text else super().__str__()


class InvalidDelay(RabbitDelayError, ValueError, page="reference/api"):
    """The delay, eta or tolerance is invalid, for example infinite, or a naive datetime.

    Attributes:
        value: The value, as the caller gave it.
        reason: What is wrong with the value.
        what: The argument's name: "delay", "eta" or "tolerance".
    """

    value: object
    reason: str
    what: str = "delay"

    text: ClassVar[str] = "{self.what} {self.value!r}: {self.reason}"


class InvalidDelayType(InvalidDelay, TypeError):
    """The delay has an unsupported type, such as a string, a bool or a datetime."""


class DelayTooLong(RabbitDelayError, ValueError, page="how-to/modules"):
    """The delay is above the layout's capacity, the largest delay of one pass through the levels.

    Attributes:
        delay_ms: The requested delay, in milliseconds.
        capacity_ms: The largest delay of the layout, in milliseconds.
    """

    delay_ms: int
    capacity_ms: int

    def __str__(self) -> str:
        return (
            f"a delay of {self.delay_ms / 1000:,.3f} s is above the layout's capacity of "
            f"{self.capacity_ms / 1000:,.3f} s: choose a shorter delay, or a layout with more "
            'levels; or add "check-in" to rabbitdelay_modules, which serves the overflow loop'
        )


class InvalidLayout(RabbitDelayError, ValueError, page="how-to/layout"):
    """The layout is invalid.

    A level's place value must be the product of the next lower level's base and place value. TTLs
    and routing keys must stay within RabbitMQ's bounds.

    Attributes:
        reason: What is wrong with the layout.
    """

    reason: str


class InvalidSetting(RabbitDelayError, ValueError, page="reference/settings"):
    """An unknown ``rabbitdelay_*`` key, or an invalid value.

    Attributes:
        key: The setting's name.
        value: The value found.
        takes: The values that the setting accepts.
    """

    key: str
    value: object
    takes: str

    text: ClassVar[str] = "{self.key} = {self.value!r}: {self.takes}"


class InvalidSigningKey(RabbitDelayError, ValueError, page="how-to/sign_encrypt_tls"):
    """A signing key is missing, too short or of the wrong type. The error does not show the key.

    Attributes:
        reason: What is wrong, and what to do.
    """

    reason: str

    text: ClassVar[str] = "invalid signing key: {self.reason}"


class InvalidSchedule(RabbitDelayError, ValueError, page="how-to/schedules"):
    """A schedule has an invalid rule, name or arguments.

    Attributes:
        value: The invalid rule, name or arguments.
        reason: What is wrong with the value.
    """

    value: object
    reason: str

    text: ClassVar[str] = "the schedule {self.value!r}: {self.reason}"


class UnknownOption(RabbitDelayError, TypeError, page="reference/api"):
    """A delayed task has an option that is unknown or not allowed here.

    Attributes:
        name: The option's name.
        value: The option's value.
        reason: What is wrong with the option.
    """

    name: str
    value: object
    reason: str = "unknown option; leave it out"

    text: ClassVar[str] = "{self.name} = {self.value!r}: {self.reason}"


class LayoutConflict(RabbitDelayError, OperationalError, page="how-to/layout"):
    """Exchanges or queues under the prefix exist on the broker with different arguments.

    Attributes:
        prefix: The prefix that both topologies use.
        reply: The broker's reply.
        advice: Why the topologies may differ, and what to do.
    """

    prefix: str
    reply: str
    advice: str = "use another rabbitdelay_prefix"

    text: ClassVar[str] = (
        "the delay levels under the prefix {self.prefix!r} differ on the broker: {self.advice}. "
        "The broker's reply: {self.reply}"
    )


class TopologyIncomplete(RabbitDelayError, OperationalError, page="how-to/declare"):
    """Exchanges or queues of the layout are missing on the broker.

    Attributes:
        prefix: The prefix of the layout.
        missing: The names of the missing exchanges and queues.
    """

    prefix: str
    missing: tuple[str, ...]

    def __str__(self) -> str:
        shown = ", ".join(self.missing[:5])
        more = f" and {len(self.missing) - 5} more" if len(self.missing) > 5 else ""
        return (
            f"the layout under the prefix {self.prefix!r} is incomplete on the broker, missing: "
            f"{shown}{more}. Run `celery rabbitdelay declare --queues`; or declare the delay "
            "levels with celery_rabbitdelay.kombu.declare, and declare the tasks' queues and bind "
            'them with bind_destination; or set rabbitdelay_declare = "auto"'
        )


class TopologyNotEmpty(RabbitDelayError, page="how-to/declare"):
    """A topology cannot be deleted, because messages still wait in it.

    Attributes:
        prefix: The topology's prefix.
        waiting: The number of messages in each queue, keyed by the queue's name.
    """

    prefix: str
    waiting: Mapping[str, int]

    def __str__(self) -> str:
        return (
            f"{sum(self.waiting.values())} messages still wait in {len(self.waiting)} queues under "
            f"the prefix {self.prefix!r}, for example in {next(iter(self.waiting))}: wait until "
            "they have reached the queues of their tasks; deleting with force=True loses them"
        )


class TopologyInUse(RabbitDelayError, page="how-to/declare"):
    """A topology cannot be deleted, because its queues have consumers.

    A worker may hold messages that it has received and not yet published. The broker does not
    report their number, and they are lost with their queue.

    Attributes:
        prefix: The topology's prefix.
        consumers: The number of consumers of each queue, keyed by the queue's name.
    """

    prefix: str
    consumers: Mapping[str, int]

    def __str__(self) -> str:
        return (
            f"{sum(self.consumers.values())} consumers still take messages from "
            f"{', '.join(self.consumers)} under the prefix {self.prefix!r}: stop the workers, or "
            "restart them with an empty --rabbitdelay-modules=; deleting with force=True loses the "
            "messages that they hold"
        )


class SameTopology(RabbitDelayError, ValueError, page="how-to/migrate"):
    """Source and target of a migration are the same topology.

    Attributes:
        prefix: The prefix of both topologies.
    """

    prefix: str

    text: ClassVar[str] = (
        "cannot migrate: source and target have the same prefix {self.prefix!r} on the same "
        "broker, and so the same queues. Give the new levels another rabbitdelay_prefix, and pass "
        "the old prefix as --from-prefix"
    )


class NeedsDistribution(
    RabbitDelayError, OperationalError, NotImplementedError, page="how-to/modules"
):
    """The message needs distribution, which ``rabbitdelay_modules`` does not list.

    Sending the task again does not help. This is an :class:`~kombu.exceptions.OperationalError`,
    because callers and Celery itself expect that error if a task or its callback cannot be sent.

    Attributes:
        what: The message: its exchange and routing key, or its priority.
    """

    what: str

    text: ClassVar[str] = (
        "{self.what} cannot be delayed: the delay levels deliver only to a single queue, at "
        "priority 4 or below. Use one queue of task_queues and a priority of at most 4, or add "
        '"distribution" to rabbitdelay_modules. For send_many, leave out envelopes=True. To keep '
        "Celery's own behavior, set rabbitdelay=False on the task"
    )


class MessageTooLarge(RabbitDelayError, OperationalError, ValueError, page="reference/bounds"):
    """The message is larger than a module accepts, or a worker decompresses.

    Nothing was sent, and sending the message again does not help. This is an
    :class:`~kombu.exceptions.OperationalError`, because callers and Celery itself expect that error
    if a task or its callback cannot be sent.

    Attributes:
        size: The size of the message's body, in bytes.
        bound: ``rabbitdelay_max_message_bytes``.
    """

    size: int
    bound: int

    text: ClassVar[str] = (
        "a body of {self.size:,} bytes is larger than rabbitdelay_max_message_bytes, "
        "{self.bound:,}: send a reference instead of the content, or raise the setting on workers "
        "and producers. A larger body is possible only without compression, to one queue of "
        "task_queues, with a priority of at most 4 and a delay within the levels' capacity"
    )


class PublishError(RabbitDelayError, OperationalError):
    """The broker did not confirm a message; treat the message as not sent.

    ``may_have_arrived`` is True if the broker may still have the message, perhaps from an earlier
    attempt that lost its connection.

    Attributes:
        exchange: The exchange that the message was published to.
        routing_key: The message's routing key.
        reason: What went wrong.
    """

    exchange: str
    routing_key: str
    reason: str

    text: ClassVar[str] = (
        "publishing to the exchange {self.exchange!r} with routing key {self.routing_key!r} "
        "failed: {self.reason}"
    )


class MessageNacked(PublishError):
    """The broker nacked the message (``basic.nack``): a queue was full or its leader down.

    The broker may accept the same message later. The broker does not have the message, unless an
    earlier attempt ended with a lost connection.
    """


class MessageRefused(PublishError):
    """The broker closed the channel because of the message, and would close it again.

    The message is larger than ``max_message_size`` or has an invalid property, or the user may not
    write to the exchange; ``reason`` has the broker's reply. Sending the same message again does
    not help. The broker does not have the message, unless an earlier attempt lost its connection.
    """


class MessageReturned(PublishError):
    """No queue takes the message (``basic.return``), or its exchange does not exist.

    The broker does not have the message, unless an earlier attempt ended with a lost connection.
    """


class DeclarationRefused(PublishError):
    """The broker refused to declare a queue, an exchange or a binding that the message needs.

    Usually the destination's queue exists with arguments that differ from the application's, the
    user lacks a permission, or an exclusive queue is not declared. If the reason is temporary, such
    as a classic queue on a node that is down, the publisher retries the declaration as after a lost
    connection. The message was not written, unless an earlier attempt ended with a lost connection.
    """


class MissingPermission(NamedTuple):
    """A permission that a user of RabbitMQ lacks.

    Attributes:
        user: The user.
        permission: ``configure``, ``write`` or ``read``. RabbitMQ 3.10 does not say which one is
            missing, so all candidates are listed: "configure or read".
        kind: ``queue`` or ``exchange``.
        name: The name of the queue or exchange.
        virtual_host: The virtual host.
        topic: The routing or binding key that no topic permission allows; None for a permission
            that is not a topic permission.
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


class PermissionMissing(RabbitDelayError, OperationalError, page="how-to/permissions"):
    """The broker's user lacks a permission.

    ``celery rabbitdelay permissions`` prints the permissions that each role needs.

    Attributes:
        permission: The permission, the resource and the user.
    """

    permission: MissingPermission

    text: ClassVar[str] = "{self.permission}"


class PublishNotPermitted(PublishError, PermissionMissing):
    """The user lacks a permission that the message needs.

    Every such error is a :class:`MessageNotPermitted` or a :class:`DeclarationNotPermitted`. The
    message was not written, unless an earlier attempt ended with a lost connection.
    """


class MessageNotPermitted(PublishNotPermitted, MessageRefused):
    """The user may not write to the exchange, or may not use this routing key.

    ``permission`` names the missing permission and the exchange.
    """


class DeclarationNotPermitted(PublishNotPermitted, DeclarationRefused):
    """The user may not declare or bind a queue or an exchange that the message needs.

    ``permission`` names the missing permission and the queue or exchange.
    """


class ConfirmTimeout(PublishError):
    """The broker did not confirm in time; if the message was written, the broker may have it."""


class ConnectionBlocked(PublishError):
    """The broker blocks publishers (memory or disk alarm) and did not unblock in time.

    The broker announces the block only when it receives a message. The broker accepts that message
    once the alarm is over, even if the connection is closed by then. So the broker may have a
    message that was written.
    """


class ConnectionLost(PublishError):
    """The connection could not be opened, was refused, or broke before the confirm.

    Raised after all permitted attempts, or at once if another attempt cannot help. The broker may
    have the message if an attempt has written it.
    """


class NoPublisherFree(RabbitDelayError, OperationalError):
    """No publisher of the pool became free within the timeout; nothing was sent.

    Attributes:
        limit: The number of publishers in the pool.
        timeout: The timeout, in seconds.
    """

    limit: int | None
    timeout: float | None

    text: ClassVar[str] = (
        "all {self.limit} publishers were in use for {self.timeout} s: "
        "raise broker_pool_limit, or delay fewer tasks at the same time"
    )


class InvalidEnvelope(RabbitDelayError, ValueError, page="reference/bounds"):
    """An envelope cannot be read or written, or exceeds a size limit.

    Attributes:
        reason: What is wrong with the envelope.
    """

    reason: str


class UnprocessableMessage(RabbitDelayError, page="how-to/undeliverable"):
    """A module cannot process a message; the message goes to ``undeliverable``.

    Attributes:
        reason: What is wrong with the message.
    """

    reason: str


class LaterVersion(UnprocessableMessage, page="how-to/upgrade"):
    """Only a later version of this package can read a message.

    A module puts the message back into the levels, until a worker of that version receives it.
    """


class InvalidDestination(RabbitDelayError, ValueError, page="how-to/undeliverable"):
    """Undeliverable messages cannot be redirected to this queue.

    Attributes:
        queue: The queue's name.
        reason: What is wrong with the queue, and what to do.
    """

    queue: str
    reason: str

    text: ClassVar[str] = "the queue {self.queue!r} {self.reason}"


class RowsNotConfirmed(RabbitDelayError, OperationalError, page="how-to/send_many"):
    """Some rows of a ``send_many`` were not confirmed; all other rows were.

    Attributes:
        report: The counts of the send, a :class:`celery_rabbitdelay.Report`.
        errors: The errors of the unconfirmed rows before ``rest``, by row number from 0, in the
            rows' order.
        uncertain: The numbers of the rows in ``errors`` that the broker may have. The broker does
            not have the other rows in ``errors``, so sending these again makes no duplicates.
        rest: The number of the first row that was not sent because the send had ended; None if
            there is no such row. The iterable has already yielded this row, unless it raised an
            error.
    """

    def __init__(self, report: Any, errors: Mapping[int, Exception], rest: int | None) -> None:
        super().__init__(report, errors, rest)
        self.report = report
        self.errors: dict[int, Exception] = dict(sorted(errors.items()))
        self.rest = rest

        self.uncertain: tuple[int, ...] = tuple(
            row for row, each in self.errors.items() if _may_have_arrived(each)
        )
        self.may_have_arrived: bool = bool(self.uncertain)

    def __str__(self) -> str:
        # Usually the first three errors have the same text.
        first = {str(error): row for row, error in reversed(list(self.errors.items())[:3])}
        shown = ", ".join(f"row {row}: {text}" for text, row in reversed(first.items()))
        more = f"; rows from {self.rest} on were not sent" if self.rest is not None else ""
        return f"{len(self.errors)} rows were not confirmed ({shown}){more}"


class TasksNotConfirmed(RabbitDelayError, OperationalError, page="how-to/send_many"):
    """Some tasks of a ``pipeline()`` or a group were not confirmed; all other tasks were.

    Attributes:
        errors: The errors of the tasks that were not confirmed, by task id, in the order of the
            failures.
        uncertain: The ids of the tasks in ``errors`` that the broker may have. The broker does not
            have the other tasks in ``errors``, so sending these again makes no duplicates.
    """

    def __init__(self, errors: Mapping[str, Exception]) -> None:
        super().__init__(errors)
        self.errors: dict[str, Exception] = dict(errors)
        self.uncertain: tuple[str, ...] = tuple(
            each for each, why in errors.items() if _may_have_arrived(why)
        )
        self.may_have_arrived: bool = bool(self.uncertain)

    def __str__(self) -> str:
        shown = ", ".join(f"{each}: {why}" for each, why in list(self.errors.items())[:3])
        return f"{len(self.errors)} tasks were not confirmed ({shown})"


class InvalidRow(RabbitDelayError, TypeError, page="how-to/send_many"):
    """A row of ``send_many`` is invalid.

    Attributes:
        row: The row.
        reason: What is wrong with the row.
    """

    row: object
    reason: str

    text: ClassVar[str] = "row {self.row!r}: {self.reason}"


class InvalidOption(RabbitDelayError, ValueError, page="how-to/spark"):
    """An option of Spark's format ``rabbitdelay`` is unknown, missing or invalid.

    Attributes:
        name: The option's name.
        value: The option's value; None if it is missing or secret.
        takes: The values that the option accepts.
    """

    name: str
    value: str | None
    takes: str

    def __str__(self) -> str:
        value = "" if self.value is None else f" = {self.value!r}"
        return f"option {self.name}{value}: {self.takes}"


class InvalidColumn(RabbitDelayError, TypeError, page="how-to/spark"):
    """A column of a DataFrame that becomes tasks is missing, unknown or of a wrong type.

    Attributes:
        name: The column's name.
        type: The column's type, as Spark writes it; None if the column is missing.
        takes: The types or columns that are accepted.
    """

    name: str
    type: str | None
    takes: str

    def __str__(self) -> str:
        shown = "" if self.type is None else f" ({self.type})"
        return f"column {self.name}{shown}: {self.takes}"


class ReadTooLong(RabbitDelayError, OperationalError, page="how-to/spark"):
    """Reading the undeliverable messages took too long; the broker may have requeued some.

    Attributes:
        messages: The number of messages that were read.
        seconds: How long the messages were held, in seconds.
    """

    messages: int
    seconds: float

    text: ClassVar[str] = (
        "reading {self.messages} undeliverable messages took {self.seconds:.0f} s, so the broker "
        "may have requeued some (consumer_timeout): set a lower limit"
    )


class AdditionMissing(RabbitDelayError, AttributeError):
    """A setting, an option, a method or a command needs an addition that is not installed.

    Attributes:
        what: The object that cannot be imported, as ``module:name``.
        addition: The name of the addition's folder in this package.
    """

    what: str
    addition: str

    text: ClassVar[str] = (
        "cannot import {self.what}: this installation of celery_rabbitdelay has no folder "
        "{self.addition!r}; install the whole package"
    )


class RegistryRequired(RabbitDelayError, TypeError, page="how-to/registry"):
    """An option or a call needs the registry, but ``rabbitdelay_registry_url`` is not set.

    Attributes:
        what: The option, with its value, or the call.
    """

    what: str

    text: ClassVar[str] = "{self.what} needs the registry: set rabbitdelay_registry_url"


class RegistryUnavailable(RabbitDelayError, OperationalError, page="how-to/registry"):
    """Redis did not answer in time, or refused a command.

    A send that raises this error has published nothing.

    Attributes:
        reason: What went wrong.
    """

    reason: str

    text: ClassVar[str] = "the registry cannot be used: {self.reason}"


class NotRecorded(RabbitDelayError, NotImplementedError, page="how-to/testing"):
    """A test needs something that ``celery_rabbitdelay.testing.recorded`` does not imitate.

    Attributes:
        what: The feature that the test needs.
    """

    what: str

    text: ClassVar[str] = "recorded() does not imitate {self.what}: use testing.travel instead"


class NotTracked(RabbitDelayError, ValueError, page="how-to/cancel"):
    """A task cannot run earlier, because the registry does not have its message.

    Attributes:
        task_id: The task's id.
    """

    task_id: str

    text: ClassVar[str] = (
        "task {self.task_id} cannot run earlier: its message waits in the broker and is not "
        "tracked. Send it with track=True, or cancel it and send it under another id"
    )


class InvalidSearch(RabbitDelayError, ValueError, page="how-to/pending"):
    """A search for waiting tasks is invalid.

    Attributes:
        term: The invalid term, or the whole search.
        takes: The values or terms that are valid.
    """

    term: str
    takes: str

    text: ClassVar[str] = "cannot search for {self.term!r}: {self.takes}"


class JobClosed(RabbitDelayError, ValueError, page="how-to/jobs"):
    """The job's state does not allow this call: open, commit, abort, or send with the job.

    Attributes:
        job: The job.
        state: ``committed``, ``aborted``, ``open`` (if opened again), or ``unknown``.
    """

    job: str
    state: str

    def __str__(self) -> str:
        way_out = {
            "unknown": "open it first, with app.rabbitdelay.open_job or app.rabbitdelay.job",
            "open": "commit or abort it, or choose another name",
        }
        return f"job {self.job!r} is {self.state}: {way_out.get(self.state, 'open another job')}"


class InvalidManagementURL(RabbitDelayError, ValueError, page="how-to/verify"):
    """The URL of RabbitMQ's management API is malformed.

    Attributes:
        url: The URL, without its password.
    """

    url: str

    text: ClassVar[str] = "invalid management URL {self.url!r}: use one such as http://host:15672"


class ManagementUnavailable(RabbitDelayError, OperationalError, page="how-to/verify"):
    """RabbitMQ's management API cannot be reached, or refuses to answer.

    Attributes:
        url: The API's URL, without user and password.
        reason: What went wrong.
        status: The HTTP status; None if there was no answer.
    """

    url: str
    reason: str
    status: int | None = None

    text: ClassVar[str] = (
        "the management API {self.url} cannot be used: {self.reason}. Enable it on the broker "
        "(rabbitmq-plugins enable rabbitmq_management), and set --management or its variable "
        "RABBITDELAY_MANAGEMENT_URL, with a user that has the tag 'monitoring'; see how-to/hosted"
    )


def _may_have_arrived(error: Exception) -> bool:
    # Celery's own publishing raises OperationalError, whether or not the message was written.
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
