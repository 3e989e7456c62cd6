"""Runs scripts and commands in Redis, on clients of redis-py that :mod:`.connection` makes."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.resources import files
from json import JSONEncoder, loads
from typing import Any, Final, NamedTuple, Protocol, Self, TypeAlias, TypeVar

from celery_rabbitdelay.exceptions import RegistryUnavailable
from celery_rabbitdelay.levels import wall_clock

ResultT = TypeVar("ResultT")

#: What scripts or commands say, one after the other.
Answers: TypeAlias = list[Any]

_ROOT: Final = "celery_rabbitdelay"

#: The functions that all scripts share.
SHARED: Final = "shared"

#: The scripts that Redis refuses when it is full, as far as they need memory. All others are run: a
#: decision takes less memory than what it frees.
GROWING: Final = ("register", "reserve", "lease", "schedules/edit")

#: The first line of a script that Redis is to run when it is full
#: (https://redis.io/docs/latest/develop/programmability/eval-intro/#eval-flags).
ALLOW_OOM: Final = "#!lua flags=allow-oom"

#: How many keys a script is about: Redis serves nobody else meanwhile.
KEYS_PER_CALL: Final = 100

#: Not ASCII: an id may hold half of a surrogate pair, for which JSON in Redis has no escape.
_json: Final = JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

#: What stands before the arguments that an error of Redis repeats.
ARGUMENTS: Final = ", with args beginning with"


class Client(Protocol):
    """A client, a pipeline or a connection of redis-py, whose methods are the commands of Redis."""

    encoder: object

    def __getattr__(self, name: str) -> Any: ...


class ScriptCall(NamedTuple):
    """A call of a script.

    Attributes:
        script: Its name, that of a file in ``lua``; that of another room has the room before it.
        keys: The keys that it is about.
        arguments: Further arguments, for each key.
        keep_ms: For how many milliseconds what it notes is kept.
        shared: Further arguments, for all keys.
    """

    script: str
    keys: Sequence[str]
    arguments: Sequence[Sequence[str | float]]
    keep_ms: int = 0
    shared: Sequence[str | int] = ()

    @property
    def packed(self) -> Sequence[str | int]:
        """The arguments as Redis takes them; redis-py takes a microsecond for each of them."""
        own_us = wall_clock.own_us()
        keep = self.keep_ms if own_us is None else f"{self.keep_ms} {own_us}"
        return (keep, _json(self.arguments), *self.shared)

    def about(self, numbers: Sequence[int]) -> Self:
        """Return the call about the keys at these positions."""
        keys, arguments = [self.keys[n] for n in numbers], [self.arguments[n] for n in numbers]
        return self._replace(keys=keys, arguments=arguments)

    @property
    def by_text(self) -> Sequence[str | int]:
        """The command that runs the script, whether the server knows it or not."""
        return ("EVAL", _text(self.script), len(self.keys), *self.keys, *self.packed)


@dataclass(eq=False, repr=False)
class Store:
    """Runs scripts and commands in Redis.

    Each client of redis-py, with all its connections, is used by one thread at a time. If that is
    interrupted between a question and its answer, the client is dropped: redis-py would lend the
    connection to the next caller, who would get that answer, or never lend it again.

    Attributes:
        connect: Returns a new client of redis-py.
        is_cluster: Whether only keys with the same hash tag are on the same server.
        errors: The errors of redis-py; the first one is the base of what Redis itself answers.
        on_call: Called after each round trip, if it is set, with the seconds that it took and with
            whether it succeeded.
    """

    connect: Callable[[], Client]
    is_cluster: bool
    errors: tuple[type[Exception], ...]
    on_call: Callable[[float, bool], None] | None = None
    _free: list[Client] = field(default_factory=list, init=False)
    _scripts: dict[str, Callable[..., str]] = field(default_factory=dict, init=False)

    def of_each(self, *calls: ScriptCall) -> list[Answers]:
        """Run scripts in one round trip to each server, about any number of keys on any servers.

        Returns:
            For each script what it says of each of its keys.

        Raises:
            RegistryUnavailable: Redis did not answer in time, or not to all of them.
        """
        parts = [
            (number, group) for number, each in enumerate(calls) for group in self._parts(each)
        ]
        parted = [calls[number].about(group) for number, group in parts]
        answers = self._run(parted) if parted else []
        said: list[dict[int, Any]] = [{} for _ in calls]
        for (number, group), answer in zip(parts, answers, strict=True):
            said[number].update(zip(group, loads(answer), strict=True))
        return [[each[key] for key in range(len(each))] for each in said]

    def _parts(self, call: ScriptCall) -> Iterator[Sequence[int]]:
        """Yield the positions of the keys that one call may have."""
        tags: dict[str, list[int]] = defaultdict(list)
        for number, key in enumerate(call.keys):
            tags[key.partition("}")[0] if self.is_cluster else ""].append(number)
        for group in tags.values():
            for start in range(0, len(group), KEYS_PER_CALL):
                yield group[start : start + KEYS_PER_CALL]

    def _by_hash(self, call: ScriptCall, client: Client) -> str:
        """Run a script by its hash; redis-py sends its text if the server does not know it."""
        if call.script not in self._scripts:
            self._scripts[call.script] = client.register_script(_text(call.script))
        return self._scripts[call.script](call.keys, call.packed, client)

    def _run(self, calls: Sequence[ScriptCall]) -> Answers:
        if len(calls) == 1 and not self.is_cluster:
            return [self._try(partial(self._by_hash, calls[0]))]
        return self.commands(lambda pipe: [pipe.execute_command(*each.by_text) for each in calls])

    def commands(self, add: Callable[[Client], object]) -> Answers:
        """Run commands in one round trip to each server.

        Args:
            add: Adds the commands to a pipeline of redis-py.
        """

        def run(client: Client) -> Answers:
            with client.pipeline(transaction=False) as pipeline:
                if self.is_cluster:
                    # Its own one knows nothing of encoding_errors.
                    pipeline.encoder = client.encoder
                add(pipeline)
                results: Answers = pipeline.execute()
                return results

        return self._try(run)

    def lease(self, name: str, token: str, lasts_ms: int, family: str = "") -> bool:
        """Take a lease, keep it, or give it back; return whether it has this token now.

        Args:
            name: Its key.
            token: Identifies its holder.
            lasts_ms: For how many milliseconds from now on nobody else can take it; 0: it is given
                back.
            family: It is taken over from a token that begins with this; empty: from none.

        Raises:
            RegistryUnavailable: Redis did not answer.
        """
        call = ScriptCall("lease", [name], [(token, lasts_ms, family)])
        ((is_held,),) = self.of_each(call)
        return bool(is_held)

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
            # redis-py catches what interrupts it while it looks for the servers of a cluster.
            interrupts = (each for each in _causes(error) if not isinstance(each, self.errors))
            unavailable = next(interrupts, None) or _unavailable(error)
        finally:
            if self.on_call is not None:
                self.on_call(time.monotonic() - began, has_succeeded)
        if unavailable is not None:
            raise unavailable  # not above, where Python would keep the error that it hides
        return result

    def _with_client(self, run: Callable[[Client], ResultT]) -> ResultT:
        try:
            client = self._free.pop()
        except IndexError:
            client = self.connect()
        try:
            result = run(client)
        except self.errors[0]:  # an answer
            self._free.append(client)
            raise
        except BaseException:
            self._drop(client)
            raise
        self._free.append(client)
        return result

    def _drop(self, client: Client) -> None:
        if self.is_cluster:
            client.disconnect_connection_pools()
            return
        # Behind Sentinel, its servers have connections as well.
        sentinel = getattr(client.connection_pool, "sentinel_manager", None)
        for each in (client, *getattr(sentinel, "sentinels", ())):
            each.connection_pool.disconnect()


#: What a script answers about a key that it cannot read begins with this.
UNREADABLE: Final = "!"


def readable(what: str, answer: Any) -> Any:
    """Return what a script says of a key.

    Args:
        what: What the key is about, for the error.
        answer: What the script says.

    Raises:
        RegistryUnavailable: The script cannot read it.
    """
    if isinstance(answer, str) and answer.startswith(UNREADABLE):
        raise RegistryUnavailable(f"{what} cannot be read: {answer}")
    return answer


def _unavailable(error: Exception) -> RegistryUnavailable:
    """Return what is raised for an error of redis-py, without the password.

    redis-py's own texts name host and port alone. But a server that does not know ``HELLO``, such
    as Redis before 6.0, repeats its arguments, and the password is one of them: also in the errors
    that have led to this one, so it has no cause.
    """
    return RegistryUnavailable(f"{type(error).__name__}: {error}".partition(ARGUMENTS)[0])


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield what an error was raised from."""
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
