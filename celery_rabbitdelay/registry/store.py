"""Runs scripts and commands in Redis, on clients of redis-py that :mod:`.connection` makes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.resources import files
from itertools import chain
from json import JSONEncoder, loads
from typing import Any, Final, NamedTuple, Protocol, Self, TypeAlias, TypeVar

from celery_rabbitdelay.exceptions import RegistryUnavailable
from celery_rabbitdelay.levels import wall_clock

ResultT = TypeVar("ResultT")

#: The answers of scripts or commands, in their order.
Answers: TypeAlias = list[Any]

_ROOT: Final = "celery_rabbitdelay"

#: The functions that all scripts share.
SHARED: Final = "shared"

#: The scripts that a full Redis refuses if they need memory. All other scripts run, because a
#: decision frees more memory than it takes.
GROWING: Final = ("register", "reserve", "lease", "schedules/edit")

#: The first line of a script that runs even if Redis is full
#: (https://redis.io/docs/latest/develop/programmability/eval-intro/#eval-flags).
ALLOW_OOM: Final = "#!lua flags=allow-oom"

#: The maximum number of keys per script call: Redis serves no other client while a script runs.
KEYS_PER_CALL: Final = 100

#: Encodes JSON without escaping it to ASCII: an id may contain half of a surrogate pair, and
#: Redis's JSON decoder rejects the escape.
_json: Final = JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

#: The text that precedes the command's arguments in an error of Redis.
ARGUMENTS: Final = ", with args beginning with"


class Client(Protocol):
    """A client, a pipeline or a connection of redis-py, whose methods are the commands of Redis."""

    encoder: object

    def __getattr__(self, name: str) -> Any: ...


class ScriptCall(NamedTuple):
    """A call of a script.

    Attributes:
        script: The name of a file in ``registry/lua``, or a folder and a file:
            ``schedules/edit``.
        keys: The keys to read or write.
        arguments: Further arguments per key.
        keep_ms: How long the written records are kept, in milliseconds.
        shared: Further arguments for all keys together.
    """

    script: str
    keys: Sequence[str]
    arguments: Sequence[Sequence[str | float]]
    keep_ms: int = 0
    shared: Sequence[str | int] = ()

    @property
    def packed(self) -> Sequence[str | int]:
        """The arguments, packed into a few values: redis-py takes a microsecond per argument."""
        own_us = wall_clock.own_us()
        keep = self.keep_ms if own_us is None else f"{self.keep_ms} {own_us}"
        return (keep, _json(self.arguments), *self.shared)

    def about(self, numbers: Sequence[int]) -> Self:
        """Return the call restricted to the keys at these positions."""
        keys, arguments = [self.keys[n] for n in numbers], [self.arguments[n] for n in numbers]
        return self._replace(keys=keys, arguments=arguments)

    @property
    def by_text(self) -> Sequence[str | int]:
        """The command that runs the script even if the server has not cached the script."""
        return ("EVAL", _text(self.script), len(self.keys), *self.keys, *self.packed)


@dataclass(eq=False, repr=False)
class Store:
    """Runs scripts and commands in Redis.

    A client of redis-py, with all its connections, is used by one thread at a time. If the thread
    is interrupted between a command and its answer, the client is dropped: redis-py would either
    lend the connection to the next caller, who would get the wrong answer, or never lend it again.

    Attributes:
        connect: Returns a new client of redis-py.
        is_cluster: Whether Redis is a cluster: only keys with the same hash tag are on the same
            server.
        errors: The errors of redis-py; the first error is the base class of Redis's error replies.
        read_only: redis-py's error if the server is a replica.
        on_call: Called after every round trip, with its duration in seconds and whether it
            succeeded.
    """

    connect: Callable[[], Client]
    is_cluster: bool
    errors: tuple[type[Exception], ...]
    read_only: type[Exception] | tuple[()] = ()
    on_call: Callable[[float, bool], None] | None = None
    _free: list[Client] = field(default_factory=list, init=False)
    _scripts: dict[str, Callable[..., str]] = field(default_factory=dict, init=False)

    def of_each(self, *calls: ScriptCall) -> list[Answers]:
        """Run scripts for any number of keys on any servers, in one round trip per server.

        Returns:
            For every script, its answers in the order of its keys.

        Raises:
            RegistryUnavailable: Redis did not answer all calls in time.
        """
        parts = [
            (number, group) for number, call in enumerate(calls) for group in self._parts(call)
        ]
        parted = [calls[number].about(group) for number, group in parts]
        answers = self._run(parted) if parted else []
        found: list[dict[int, Any]] = [{} for _ in calls]
        for (number, group), answer in zip(parts, answers, strict=True):
            found[number].update(zip(group, loads(answer), strict=True))
        return [[by_key[key] for key in range(len(by_key))] for by_key in found]

    def _parts(self, call: ScriptCall) -> Iterator[Sequence[int]]:
        """Yield the positions of keys, in groups that one call may contain.

        Keys with the same hash tag are together, because a script writes an index for each tag.
        """
        tags: dict[str, list[int]] = defaultdict(list)
        for number, key in enumerate(call.keys):
            tags[key.partition("}")[0]].append(number)
        groups = tags.values() if self.is_cluster else [[*chain.from_iterable(tags.values())]]
        for group in groups:
            for start in range(0, len(group), KEYS_PER_CALL):
                yield group[start : start + KEYS_PER_CALL]

    def _by_hash(self, call: ScriptCall, client: Client) -> str:
        """Run a script by its hash; redis-py sends the text of a script that the server lacks."""
        if call.script not in self._scripts:
            self._scripts[call.script] = client.register_script(_text(call.script))
        return self._scripts[call.script](call.keys, call.packed, client)

    def _run(self, calls: Sequence[ScriptCall]) -> Answers:
        if len(calls) == 1 and not self.is_cluster:
            return [self._try(partial(self._by_hash, calls[0]))]
        return self.commands(lambda pipe: [pipe.execute_command(*call.by_text) for call in calls])

    def commands(self, add: Callable[[Client], object]) -> Answers:
        """Run commands in one round trip per server.

        Args:
            add: Adds the commands to a pipeline of redis-py.
        """

        def run(client: Client) -> Answers:
            with client.pipeline(transaction=False) as pipeline:
                if self.is_cluster:
                    # The pipeline's own encoder ignores encoding_errors.
                    pipeline.encoder = client.encoder
                add(pipeline)
                results: Answers = pipeline.execute()
                return results

        return self._try(run)

    def lease(self, name: str, token: str, lasts_ms: int, family: str = "") -> bool:
        """Take, renew or release a lease; return whether this token holds the lease now.

        Args:
            name: The lease's key.
            token: Identifies the holder.
            lasts_ms: How long the lease lasts, in milliseconds from now; 0 releases it.
            family: Take over the lease if the holder's token begins with this text; empty for no
                takeover.

        Raises:
            RegistryUnavailable: Redis did not answer.
        """
        call = ScriptCall("lease", [name], [(token, lasts_ms, family)])
        ((is_held,),) = self.of_each(call)
        return bool(is_held)

    def own_connection(self) -> Any:
        """Return a new open connection of redis-py to the only server; the caller closes it.

        Raises:
            RegistryUnavailable: Redis does not answer.
        """
        try:
            connection = self.connect().connection_pool.make_connection()
            connection.connect()
        except self.errors as error:
            raise _unavailable(error) from None
        return connection

    def close(self) -> None:
        """Close all connections that are not in use."""
        while self._free:
            self._drop(self._free.pop())

    def _try(self, run: Callable[[Client], ResultT]) -> ResultT:
        began = time.monotonic()
        unavailable: BaseException | None = None
        has_succeeded = False
        try:
            result = self._with_client(run)
            has_succeeded = True
        except self.errors as error:
            # While redis-py looks for a cluster's servers, it catches and wraps interruptions.
            interrupts = (cause for cause in _causes(error) if not isinstance(cause, self.errors))
            unavailable = next(interrupts, None) or _unavailable(error)
        finally:
            if self.on_call is not None:
                self.on_call(time.monotonic() - began, has_succeeded)
        if unavailable is not None:
            raise unavailable  # outside the except block, so that it has no __context__
        return result

    def _with_client(self, run: Callable[[Client], ResultT]) -> ResultT:
        try:
            client = self._free.pop()
        except IndexError:
            client = self.connect()
        try:
            result = run(client)
        except BaseException as error:
            # After an error reply, the connection is usable, unless it leads to a former primary.
            if isinstance(error, self.errors[0]) and not isinstance(error, self.read_only):
                self._free.append(client)
            else:
                self._drop(client)
            raise
        self._free.append(client)
        return result

    def _drop(self, client: Client) -> None:
        if self.is_cluster:
            client.disconnect_connection_pools()
            return
        # With Sentinel, the client also has connections to the sentinels.
        sentinel = getattr(client.connection_pool, "sentinel_manager", None)
        for connected in (client, *getattr(sentinel, "sentinels", ())):
            connected.connection_pool.disconnect()


#: The first character of a script's answer about a key that it cannot read.
UNREADABLE: Final = "!"


def readable(subject: str, answer: Any) -> Any:
    """Return a script's answer about a key, unless it is an error.

    Args:
        subject: The noun for the error text, such as ``the record of task 7``.
        answer: The answer of the script.

    Raises:
        RegistryUnavailable: The script cannot read the key.
    """
    if isinstance(answer, str) and answer.startswith(UNREADABLE):
        raise RegistryUnavailable(f"{subject} cannot be read: {answer}")
    return answer


def _unavailable(error: Exception) -> RegistryUnavailable:
    """Return the exception to raise for an error of redis-py, without the password.

    The texts of redis-py name only host and port. But a server without ``HELLO``, such as Redis
    before 6.0, repeats the command's arguments, among them the password. The causes of the error
    contain it too, so the new exception has no cause.
    """
    return RegistryUnavailable(f"{type(error).__name__}: {error}".partition(ARGUMENTS)[0])


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the chain of causes of an error."""
    cause = error.__cause__
    while cause is not None:
        yield cause
        cause = cause.__cause__


@cache
def _text(name: str) -> str:
    room, _, own_name = name.rpartition("/")
    shared = files(__package__).joinpath("lua", f"{SHARED}.lua").read_text()
    own = files(_ROOT).joinpath(room or "registry", "lua", f"{own_name}.lua").read_text()
    text = f"{shared}\n{own}"
    return text if name in GROWING else f"{ALLOW_OOM}\n{text}"
