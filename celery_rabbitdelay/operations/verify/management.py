"""RabbitMQ's management HTTP API, and what ``verify`` reads there.

It needs the plugin ``rabbitmq_management`` and a user with the tag ``monitoring``; on RabbitMQ
3.10, which shows feature flags to nobody else, with the tag ``administrator``:
https://www.rabbitmq.com/docs/management#permissions
"""

from __future__ import annotations

import base64
import json
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from email.utils import parsedate_to_datetime
from functools import partial
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias
from urllib.parse import SplitResult, quote, unquote, urlencode, urlsplit

from kombu import Connection
from kombu.transport.pyamqp import SSLTransport

from celery_rabbitdelay.exceptions import InvalidManagementURL, ManagementUnavailable
from celery_rabbitdelay.levels.quirks import DEAD_LETTERING_FLAG, version_of
from celery_rabbitdelay.levels.shown_url import without_password
from celery_rabbitdelay.levels.topology import Binding
from celery_rabbitdelay.publishing.declaration import connect

#: Seconds that each step of a request may take.
TIMEOUT: Final = 10.0

#: Seconds. A node writes its time in whole seconds, and looks at its clock once a second.
CLOCK_STEP: Final = 2.0

#: The plugin's default ports, without and with TLS.
PORTS: Final = {"http": 15672, "https": 15671}

#: Seconds. A quorum queue reports its totals every five seconds (``quorum_tick_interval``).
TOTALS_AGE: Final = 6.0

NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})

#: An object as the API writes it, see https://www.rabbitmq.com/docs/http-api-reference
Json: TypeAlias = Mapping[str, Any]


class ManagementAPI:
    """Asks the management HTTP API.

    Args:
        url: ``http://user:password@host:15672``; ``https`` for TLS. A path is a ``path_prefix`` of
            the plugin.
        tls: The files for TLS, by the keys of ``broker_use_ssl``: ``ca_certs``, the certificates of
            authorities (the system's by default), ``certfile`` and ``keyfile``, the client's own.

    Attributes:
        url: The URL without user and password.

    Raises:
        InvalidManagementURL: It is not such a URL.
    """

    def __init__(self, url: str, tls: Mapping[str, Any] = NOTHING) -> None:
        parts = parts_of_url(url)
        if parts is None:
            raise InvalidManagementURL(without_password(url))
        host = parts.hostname or ""
        shown = f"[{host}]" if ":" in host else host
        port = parts.port or PORTS[parts.scheme]
        self.url = f"{parts.scheme}://{shown}:{port}{parts.path.rstrip('/')}"
        user = f"{unquote(parts.username or 'guest')}:{unquote(parts.password or 'guest')}"
        self._authorization = f"Basic {base64.b64encode(user.encode()).decode()}"
        authorities, certificate, key = map(tls.get, ("ca_certs", "certfile", "keyfile"))
        try:
            context = ssl.create_default_context(cafile=authorities or None)
            if certificate:
                context.load_cert_chain(certificate, key or None)
        except OSError as wrong:
            files = ", ".join(str(file) for file in (authorities, certificate, key) if file)
            raise ManagementUnavailable(self.url, f"cannot read {files}: {wrong}") from wrong
        # Not through a proxy: AMQP reaches the broker without one.
        self._connect: Callable[[], HTTPConnection]
        if parts.scheme == "https":
            self._connect = partial(HTTPSConnection, host, port, timeout=TIMEOUT, context=context)
        else:
            self._connect = partial(HTTPConnection, host, port, timeout=TIMEOUT)
        self._path = parts.path.rstrip("/")

    def get(self, *path: str, **query: str) -> Any:
        """Return what the API says under a path.

        Args:
            *path: The words of the path behind ``/api``; they are quoted.
            **query: The query.

        Raises:
            ManagementUnavailable: It does not answer, or not with JSON, or refuses.
        """
        return self.dated(*path, **query)[0]

    def dated(self, *path: str, **query: str) -> tuple[Any, float]:
        """Return the same, and the time at the node that answers, in seconds since the epoch.

        It may be up to :data:`CLOCK_STEP` later there.
        """
        with self._asked(path, urlencode(query)) as answer:
            date = parsedate_to_datetime(answer.headers.get("Date", ""))
            return json.load(answer), date.timestamp()

    def change(self, method: str, *path: str, **values: Any) -> None:
        """Make or delete something.

        Args:
            method: PUT or DELETE.
            *path: As for :meth:`get`.
            **values: What it is to be.

        Raises:
            ManagementUnavailable: It does not answer, or refuses.
        """
        with self._asked(path, method=method, body=json.dumps(values).encode()):
            pass

    @contextmanager
    def _asked(
        self, path: Sequence[str], query: str = "", method: str = "GET", body: bytes | None = None
    ) -> Iterator[HTTPResponse]:
        address = "/".join([f"{self._path}/api", *(quote(word, safe="") for word in path)])
        headers = {"Authorization": self._authorization, "Content-Type": "application/json"}
        try:
            with closing(self._connect()) as connection:
                connection.request(method, f"{address}?{query}", body, headers)
                answer = connection.getresponse()
                # A redirection is not followed: it would take the password to another host.
                if answer.status >= HTTPStatus.MULTIPLE_CHOICES:
                    reason = f"{'/'.join(path)}: {answer.status} {answer.reason}"
                    raise ManagementUnavailable(self.url, reason, answer.status)
                yield answer
        except (OSError, HTTPException, ValueError) as error:
            raise ManagementUnavailable(self.url, str(error) or repr(error)) from error


def management_api(connection: Connection, url: str | None) -> ManagementAPI:
    """Return the API at a URL; None: at the broker that the connection reaches.

    Raises:
        InvalidManagementURL: It is not such a URL.
        OSError: The broker cannot be reached.
    """
    if url is not None:
        return ManagementAPI(url, tls_files_of(connection))
    connect(connection)  # the host is the one of several that was reached
    return management_api_of(connection)


def management_api_of(connection: Connection) -> ManagementAPI:
    """Return the API at the broker's host and the plugin's default port, with AMQP's user."""
    is_tls = connection.ssl or isinstance(connection.transport, SSLTransport)
    host = connection.hostname or "localhost"
    host = f"[{host}]" if ":" in host else host
    user, password = connection.userid or "guest", connection.password or "guest"
    return ManagementAPI(
        f"{'https' if is_tls else 'http'}://{quote(user, '')}:{quote(password, '')}@{host}",
        tls_files_of(connection),
    )


def tls_files_of(connection: Connection) -> Mapping[str, Any]:
    """Return the TLS files that the application gives for its broker."""
    return connection.ssl if isinstance(connection.ssl, dict) else NOTHING


def parts_of_url(url: str) -> SplitResult | None:
    """Return the parts of a URL; None if it is malformed, or may be."""
    with suppress(ValueError):
        parts = urlsplit(url)
        # If "/", "?" or "#" stands in a password, its rest is taken for one of these.
        rest = f"{parts.path}{parts.query}{parts.fragment}"
        if (
            parts.scheme in PORTS
            and not parts.query
            and parts.hostname
            and parts.port != 0
            and "@" not in rest
        ):
            return parts
    return None


class Inventory(NamedTuple):
    """What there is in one virtual host, and in its cluster.

    Attributes:
        version: The version of RabbitMQ.
        queues: Every queue by its name, always with ``arguments`` and ``type``.
        exchanges: Every exchange by its name, always with ``arguments``.
        bindings: Every binding, except those of the default exchange.
        consumers: The queue and the tag of each consumer, up to five seconds ago.
        policies: Every policy, and every operator policy, which is applied in addition; ``kind``
            says which it is.
        nodes: Whether each node of the cluster runs, by its name.
        alarmed: The names of the nodes that are low on memory or disk space.
        disabled_flags: The feature flags that are disabled; read on RabbitMQ 3.10 only.
        limits: The limits of the virtual host, such as ``max-queues``.
        held: See :func:`held_messages`.
        clock_ahead: By how many seconds this machine's clock is ahead of the broker's, at least;
            negative if it is behind, and 0 if they may be the same.
    """

    version: str = "0"
    queues: Mapping[str, Json] = NOTHING
    exchanges: Mapping[str, Json] = NOTHING
    bindings: frozenset[Binding] = frozenset()
    consumers: Sequence[tuple[str, str]] = ()
    policies: Sequence[Json] = ()
    nodes: Mapping[str, bool] = NOTHING
    alarmed: Sequence[str] = ()
    disabled_flags: frozenset[str] = frozenset()
    limits: Json = NOTHING
    held: Mapping[str, int] = NOTHING
    clock_ahead: float = 0.0


def read_inventory(api: ManagementAPI, virtual_host: str) -> Inventory:
    """Read a virtual host.

    Args:
        api: The management API.
        virtual_host: Its name.

    Raises:
        ManagementUnavailable: The API does not answer, or the user may not read all of it.
    """
    # The machine's own clock: the broker does not travel in time with a test.
    before, (overview, broker), after = time.time(), api.dated("overview"), time.time()
    at_least, at_most = before - broker - CLOCK_STEP, after - broker
    version = overview["rabbitmq_version"]
    needs_flag = DEAD_LETTERING_FLAG.is_in(version_of(version))
    flags = api.get("feature-flags") if needs_flag else ()
    # Without statistics, which are up to five seconds old, and slow if there are many queues. With
    # enable_queue_totals, RabbitMQ 3.10 leaves out the queues whose node is away.
    queues = _by_name(api.get("queues", virtual_host, disable_stats="true"))
    nodes = api.get("nodes")
    limits = api.get("vhost-limits", virtual_host)
    return Inventory(
        version=version,
        queues={
            name: {"type": each["arguments"].get("x-queue-type", "classic"), **each}
            for name, each in queues.items()
        },
        exchanges=_by_name(api.get("exchanges", virtual_host)),
        bindings=frozenset(
            Binding(
                each["source"],
                each["routing_key"],
                each["destination"],
                each["destination_type"] == "exchange",
            )
            for each in api.get("bindings", virtual_host)
            if each["source"]
        ),
        consumers=[
            (each["queue"]["name"], each["consumer_tag"])
            for each in api.get("consumers", virtual_host)
        ],
        policies=[
            {"kind": kind, **each}
            for kind, path in (("policy", "policies"), ("operator policy", "operator-policies"))
            for each in api.get(path, virtual_host)
        ],
        nodes={each["name"]: bool(each.get("running")) for each in nodes},
        alarmed=[
            each["name"] for each in nodes if each.get("mem_alarm") or each.get("disk_free_alarm")
        ],
        disabled_flags=frozenset(each["name"] for each in flags if each["state"] == "disabled"),
        limits={key: value for each in limits for key, value in each["value"].items()},
        held=held_messages(api, virtual_host),
        clock_ahead=max(at_least, 0.0) + min(at_most, 0.0),
    )


def held_messages(api: ManagementAPI, virtual_host: str) -> Mapping[str, int]:
    """Return how many messages dead-lettering holds in each quorum queue that has such messages.

    They are due, and the queue that they go to has not taken them yet; perhaps it refuses. AMQP
    counts the messages that are ready, and so leaves them out. Queues whose node is away are
    missing, and figures are up to :data:`TOTALS_AGE` old.

    Raises:
        ManagementUnavailable: As :meth:`ManagementAPI.get`.
    """
    totals = api.get("queues", virtual_host, disable_stats="true", enable_queue_totals="true")
    held = {
        each["name"]: each["messages"] - each["messages_ready"] - each["messages_unacknowledged"]
        for each in totals
        if "messages" in each
    }
    return {name: messages for name, messages in held.items() if messages > 0}


def _by_name(entities: Iterable[Json]) -> dict[str, Json]:
    return {each["name"]: {**each, "arguments": each.get("arguments") or {}} for each in entities}
