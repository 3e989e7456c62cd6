"""Every fault that ``verify`` can find, and the report of those that it has found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

from celery_rabbitdelay.command import shared

#: ``danger``: tasks are lost, early, late by minutes, run twice, or cannot be sent. ``warning``:
#: they are as soon as something else happens, or something is slower than it could be. ``note``:
#: good to know; nothing happens before somebody changes something.
Severity: TypeAlias = Literal["danger", "warning", "note"]

#: One fault of one subject: a code of :data:`FAULTS`, the subject, as
#: ``queue rabbitdelay.hours.7``, and the values of the placeholders in its texts.
FoundRow: TypeAlias = tuple[str, str, Mapping[str, object]]


#: The keys of policies and arguments that bound a queue.
BOUNDS: Final = ("max-length", "max-length-bytes")


class Fault(NamedTuple):
    """A kind of fault; its texts have placeholders.

    Attributes:
        severity: How bad it is.
        what: What was found.
        consequence: What happens to tasks.
        remedy: The way out.
    """

    severity: Severity
    what: str
    consequence: str
    remedy: str


class Finding(NamedTuple):
    """A fault with its code and with all that it concerns."""

    severity: Severity
    code: str
    subjects: tuple[str, ...]
    what: str
    consequence: str
    remedy: str


class Verification(NamedTuple):
    """The result of ``verify``: the broker's version, and what was found, the worst first."""

    version: str
    findings: tuple[Finding, ...]


def findings_of(rows: Iterable[FoundRow], **common: object) -> tuple[Finding, ...]:
    """Return one finding for all rows that differ in their subjects alone, the worst first.

    Args:
        rows: The rows.
        **common: Values for all of them: ``prefix``, ``vhost`` and ``user``, quoted for a shell.
    """
    found: dict[Finding, dict[str, None]] = {}
    for code, subject, values in rows:
        severity, *texts = FAULTS[code]
        what, consequence, remedy = (text.format_map({**common, **values}) for text in texts)
        finding = Finding(severity, code, (), what, consequence, remedy)
        found.setdefault(finding, {})[subject] = None
    together = [finding._replace(subjects=tuple(subjects)) for finding, subjects in found.items()]
    return tuple(sorted(together, key=lambda each: get_args(Severity).index(each.severity)))


def lines_of(finding: Finding) -> Iterator[str]:
    """Yield the lines that show a finding."""
    yield f"{finding.severity}  {finding.code}: {shared.first_of(finding.subjects, 3)}"
    yield f"  {finding.what}"
    yield f"  consequence: {finding.consequence}"
    yield f"  way out: {finding.remedy}"


def blocked() -> Finding:
    """Return the finding of a broker that blocks publishers, where nobody runs ``verify``."""
    (finding,) = findings_of([("publishers-blocked", "RabbitMQ", {})])
    return finding


_danger = partial(Fault, "danger")
_warning = partial(Fault, "warning")
_note = partial(Fault, "note")

_DECLARE: Final = "run `celery -A proj rabbitdelay declare`"
_DECLARE_QUEUES: Final = "run `celery -A proj rabbitdelay declare --queues`"
_MIGRATE: Final = "move what waits with `celery -A proj rabbitdelay migrate --from-prefix {prefix}`"
_MIGRATE_ORPHANS: Final = (
    "change rabbitdelay_prefix, and "
    f"{_MIGRATE}, with the --from-layout, --from-tick, --from-shards and --from-queue-type that "
    "these levels had; then delete them"
)
_PUT: Final = "put it again, from your code or with `celery -A proj rabbitdelay schedules put-beat`"
_POLICY_SETS: Final = "{policy} sets {key} to {value!r}"
_NARROW: Final = (
    "if tasks must not be lost there, leave the key out: `{without}`; or narrow the pattern"
)

#: What each key of a policy does to the queues of the levels and of the modules.
POLICY_CONSEQUENCES: Final[Mapping[str, str]] = {
    "expires": "RabbitMQ deletes the queue with its messages after that long without a consumer",
    "message-ttl": "tasks leave a level early and are put back again and again; what a module did "
    "not take in time becomes undeliverable, and what is undeliverable is dropped",
    **dict.fromkeys(
        BOUNDS,
        "a full queue refuses messages: sending fails, the level before it stalls, and what is "
        "undeliverable is lost",
    ),
    "overflow": "RabbitMQ dead-letters at most once: a message is lost if the next queue is away",
    "dead-letter-routing-key": "a message loses the routing key that leads it to its queue, and "
    "goes to undeliverable",
    "delivery-limit": "a message that was given back this often becomes undeliverable, leaves a "
    "level early, or, if it is undeliverable, is dropped",
}

#: The same for the queues of tasks.
DESTINATION_CONSEQUENCES: Final[Mapping[str, str]] = {
    "expires": "RabbitMQ deletes the queue with its tasks after that long without a worker",
    "message-ttl": "tasks that no worker takes for that long are dropped, or go to a dead-letter "
    "exchange",
    "delivery-limit": "tasks that were redelivered more often are dropped, or go to a dead-letter "
    "exchange",
}

#: All faults by their codes, words for programs that keep their meaning.
FAULTS: Final[Mapping[str, Fault]] = {
    # The broker.
    "version-too-old": _danger(
        "quorum queues of this version have no TTL, or dead-letter at most once",
        "the levels cannot be declared, or lose tasks",
        "upgrade to RabbitMQ 3.10 or later",
    ),
    "version-fault": _warning(
        "dead-lettering of quorum queues stops when their replicas change (rabbitmq-server #16652)",
        "after a node was added or removed, tasks may stand still",
        "upgrade to RabbitMQ 4.3.3 or later",
    ),
    "feature-flag-disabled": _danger(
        "the feature flag is disabled",
        "RabbitMQ dead-letters at most once: tasks between two levels are lost if a node fails",
        "`rabbitmqctl enable_feature_flag {flag}`, then restart the nodes one by one",
    ),
    "clock-difference": _warning(
        "its clock is at least {difference:.0f} s {ahead} the broker's",
        "tasks come late, because a worker whose clock is behind puts due tasks back",
        "synchronize the clocks (NTP); workers tolerate rabbitdelay_early_tolerance",
    ),
    "publishers-blocked": _danger(
        "RabbitMQ blocks publishers, because a node is low on memory or disk space",
        "no task can be sent, nor passed on by a module; tasks that wait come late",
        "free memory or disk space on the node; until then, let it use more memory with "
        "`rabbitmqctl set_vm_memory_high_watermark 0.7`, or more disk space with "
        "`rabbitmqctl set_disk_free_limit 50MB`, there",
    ),
    "queue-limit": _danger(
        "it may have {most} queues (max-queues) and has {there}; {missing} more are needed",
        "declaring them fails with PRECONDITION_FAILED: no worker starts, or no task can be sent",
        "{command}",
    ),
    "permission-missing": _danger(
        "the user {user!r} lacks the permission {permission}",
        "declaring, binding, sending or serving the modules fails with ACCESS_REFUSED",
        "run what `celery -A proj rabbitdelay permissions worker --user {user}` prints, "
        "or those for another role",
    ),
    # The levels.
    "not-declared": _warning(
        "the levels are not declared",
        "the first producer or worker declares the levels, which takes some seconds",
        _DECLARE,
    ),
    "nobody-declares": _danger(
        "the levels are not declared, and rabbitdelay_declare is 'never'",
        "no delayed task can be sent: TopologyIncomplete",
        _DECLARE,
    ),
    "missing": _danger(
        "it does not exist",
        "delayed tasks are not sent or become undeliverable; those in a deleted queue are lost",
        f"{_DECLARE}, then redrive what is undeliverable",
    ),
    "layout-conflict": _danger(
        "another layout is declared under this prefix: {difference}",
        "no delayed task can be sent: LayoutConflict",
        f"restore the settings that are declared, or change rabbitdelay_prefix and {_MIGRATE}",
    ),
    "differs": _danger(
        "{difference}",
        "declaring the levels fails with LayoutConflict, and tasks may be early, late or lost here",
        f"change rabbitdelay_prefix and {_MIGRATE}, or delete this once it is empty and declare it",
    ),
    "binding-additional": _danger(
        "somebody has added a binding to an exchange or queue of the levels or of a module",
        "tasks leave the levels there, early or twice, or messages without a due time come in",
        "remove the binding on the management page of the exchange {source}",
    ),
    "level-consumed": _danger(
        "it has a consumer that does not belong to this package",
        "whoever consumes takes tasks: they are lost, or early",
        "stop the program that `rabbitmqctl list_consumers -p {vhost} queue_name channel_pid "
        "consumer_tag` shows for it; a worker must not have this queue in its task_queues or -Q",
    ),
    "classic-levels": _warning(
        "the queues of the levels are classic queues (rabbitdelay_queue_type)",
        "tasks between two levels are lost if the broker fails, or if a queue refuses them",
        f"set rabbitdelay_queue_type to 'quorum', change rabbitdelay_prefix and {_MIGRATE[:-1]} "
        "--from-queue-type classic`",
    ),
    "probe-unknown": _note(
        "no worker that probes these levels has answered",
        "nothing notices levels in which no delay ends, before tasks are late",
        "start a worker that serves probe, and allow this user to ask the workers: run the "
        "commands that `celery -A proj rabbitdelay permissions operator --user {user}` prints",
    ),
    "probe-failed": _danger(
        "a probe through it was {late:+,.0f} s late, or is missing for as long",
        "delays that pass there end too late, or not at all, or too early",
        "remove what the other findings name, and look again after two minutes; if there are none, "
        "see 'If no delay ends' on the page about declaring the levels",
    ),
    # The schedules.
    "registry-unavailable": _danger(
        "{error}",
        "registered tasks wait until Redis answers, or run although they were cancelled "
        "(rabbitdelay_registry_down); verify cannot check schedules",
        "start Redis, or correct rabbitdelay_registry_url",
    ),
    "schedule-overdue": _danger(
        "its next occurrence was due more than 90 s ago and has not come",
        "the schedule stands still until an occurrence comes",
        "start workers for its queue; they send a lost occurrence again in a few minutes, or log "
        "why they do not",
    ),
    "schedule-lost": _warning(
        "Redis has lost its task and arguments",
        "its next occurrence brings them back; if that is lost, it is not sent again",
        _PUT,
    ),
    "orphan": _warning(
        "it does not belong to this layout",
        "nothing serves tasks that wait there: when they are due, their keys fit no binding",
        _MIGRATE_ORPHANS,
    ),
    # Policies and operator policies.
    "policy": _danger(_POLICY_SETS, "{consequence}", "{guard}"),
    "destination-policy": _warning(_POLICY_SETS, "{consequence}", _NARROW),
    # The queues of tasks.
    "destination-missing": _danger(
        "the queue does not exist, and rabbitdelay_declare is 'never'",
        "sending a delayed task to it fails with TopologyIncomplete",
        f"{_DECLARE_QUEUES}, or remove it from task_queues",
    ),
    "destination-differs": _danger(
        "{difference}",
        "declaring it fails with PRECONDITION_FAILED: no worker starts, and no task is sent to it",
        "set the arguments in task_queues that the queue has, or delete it once it is empty",
    ),
    "destination-unbound": _warning(
        "the queue is not bound to {exchange}",
        "due tasks go through distribution, which is slower and needs a worker that serves it",
        _DECLARE_QUEUES,
    ),
    "destination-cut-off": _danger(
        "the queue is not bound to {exchange}",
        "due tasks stay in distribution, which no worker serves",
        _DECLARE_QUEUES,
    ),
    "destination-classic": _note(
        "it is a classic queue, which is on one node alone",
        "due tasks wait while that node is away, and are lost with its disk; on a cluster, they "
        "may come minutes after its return",
        "set task_default_queue_type to 'quorum', or x-queue-type in task_queues; or list several "
        "nodes in broker_url, or name the queue in rabbitdelay_may_refuse",
    ),
    "destination-drops": _warning(
        "it drops its oldest tasks when it is full ({bound})",
        "due tasks are lost while workers are slow or away",
        "leave the bound out, or set overflow to reject-publish",
    ),
    "destination-refuses": _danger(
        "it refuses tasks when it is full ({bound}), and the application does not know it",
        "each 32 refused tasks hold up the tasks of all other queues for up to 3 minutes",
        "add {queue!r} to rabbitdelay_may_refuse",
    ),
    # Nodes and replicas.
    "quorum-lost": _danger(
        "only {online} of {members} replicas are online; those on {away} are away",
        "the queue takes and gives nothing: tasks wait in it, and before it, until it is back",
        "start the nodes that are away; if most are gone for good, its messages are lost: delete "
        f"the queue, and {_DECLARE_QUEUES}",
    ),
    "replica-offline": _warning(
        "{online} of {members} replicas are online; that on {away} is away",
        "if more nodes fail, the queue stops, and tasks wait until they are back",
        "start the node that is away; if it is gone for good: {commands}",
    ),
    "replicas-few": _warning(
        "it has {members} replicas in a cluster of {nodes} nodes",
        "tasks wait in it while a node is away, and are lost with its disk",
        "add replicas, on nodes that run: {commands}",
    ),
    "unreachable": _danger(
        "it is a classic queue, and its node {node} does not run",
        "its tasks are tried again until it is back; on RabbitMQ 4.3 they hold up other queues",
        "start the node; if it is gone for good, with its queues: "
        f"`rabbitmqctl forget_cluster_node {{node}}`, then {_DECLARE_QUEUES}",
    ),
}
