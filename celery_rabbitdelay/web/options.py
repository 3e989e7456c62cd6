"""The options of the page (who may see it and act, what it shows), and hashes of passwords."""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Any, Final, Literal, NamedTuple, Self, TypeAlias, get_args

from celery_rabbitdelay.exceptions import InvalidSetting
from celery_rabbitdelay.levels.shown_url import HIDDEN
from celery_rabbitdelay.operations.management import parts_of_url

logger = logging.getLogger(__name__)

#: A viewer reads; an operator also acts.
Role: TypeAlias = Literal["viewer", "operator"]

#: The setting that has the options; see :attr:`.Settings.web`.
SETTING: Final = "rabbitdelay_web"

_ROLES: Final = f"takes one of {', '.join(get_args(Role))}"

#: Bytes of a secret at least.
MIN_SECRET: Final = 32

#: The cost of scrypt: 32 MiB and about a tenth of a second, as OWASP's Password Storage Cheat Sheet
#: recommends for r = 8 and p = 3.
_N, _R, _P = 2**15, 8, 3

#: Bytes of memory that OpenSSL may use; its own bound is what N = 2**14 takes.
_MEMORY: Final = 2**26

_HASH: Final = re.compile(
    r"scrypt:(\d{1,7}):(\d{1,2}):(\d{1,2}):([\w-]{22}==):([\w-]{43}=)", re.ASCII
)

#: The hash of a password that nobody has: an unknown name takes as long as a wrong password.
NOBODY: Final = (
    "scrypt:32768:8:3:AAAAAAAAAAAAAAAAAAAAAA==:AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="
)


class User(NamedTuple):
    """Somebody who uses the page.

    Attributes:
        name: Who it is, for the log.
        role: ``viewer`` or ``operator``.
    """

    name: str
    role: Role = "viewer"

    @property
    def may_act(self) -> bool:
        """Whether the user may change anything."""
        return self.role == "operator"


@dataclass(frozen=True, repr=False)
class Options:
    """What may be configured.

    With none of ``users``, ``proxy_header`` and ``identify``, only this machine is answered.

    Raises:
        InvalidSetting: An option is wrong.
    """

    #: Who may sign in: ``{"ada": {"password": "scrypt:...", "role": "operator"}}``. The role is
    #: "viewer" unless it is given. ``celery rabbitdelay web --hash-password`` makes a password.
    users: Mapping[str, Mapping[str, str]] | None = None

    #: The header in which a proxy names the user that it has authenticated: "X-Remote-User".
    proxy_header: str | None = None

    #: The addresses or networks of that proxy: "10.0.0.5", "10.1.0.0/16"; nobody else is answered.
    proxies: Sequence[str] = ()

    #: Which of the users that the proxy names may act; all others may only read.
    operators: Sequence[str] = ()

    #: A function that takes the ASGI scope of a request and returns a :class:`User`, or None for
    #: nobody; it is called in a thread.
    identify: Callable[[Mapping[str, Any]], User | None] | None = None

    #: What everybody on this machine may, where nobody else may: "viewer" or "operator".
    loopback_role: Role = "viewer"

    #: The names under which the page is reached: "tasks.example.com". None: any with users, and
    #: those of this machine without.
    hosts: Sequence[str] | None = None

    #: What signs the cookies, at least 32 bytes. None: a random one, so that users sign in again
    #: after a restart; so they do without a registry, which remembers who has signed out. Several
    #: processes that serve one page need both.
    secret: str | None = None

    #: Whether browsers reach the page over HTTPS although a proxy reaches it over HTTP.
    https: bool = False

    #: Whether the arguments of tasks and the bodies of messages are shown.
    shows_arguments: bool = False

    #: What hides a part of them, by the name of the task and their text. If it raises, they are
    #: hidden.
    mask: Callable[[str, str], str] | None = None

    #: The URL of the broker's management API, http://user:password@host:15672. None: that of the
    #: broker's host, with its user.
    management: str | None = None

    @classmethod
    def of(cls, *given: Mapping[str, Any]) -> Self:
        """Read options; the later ones override the earlier."""
        merged = {name: value for each in given for name, value in each.items()}
        names = [each.name for each in fields(cls)]
        for name in merged:
            _check(name in names, name, f"no such option; there are {', '.join(names)}")
        return cls(**merged)

    def __post_init__(self) -> None:
        ways = [self.users, self.proxy_header, self.identify]
        is_one = sum(each is not None for each in ways) <= 1
        _check(is_one, "users", "takes one of users, proxy_header and identify")
        _check(self.users is None or self.users, "users", "takes at least one user")
        for name, user in (self.users or {}).items():
            _check_user(name, user)
        has_both = bool(self.proxy_header) == bool(self.proxies)
        _check(has_both, "proxies", "proxy_header and proxies need each other")
        _check(callable(self.identify or bool), "identify", "takes a function of an ASGI scope")
        _check(callable(self.mask or bool), "mask", "takes a function of a task's name and a text")
        _check(self.loopback_role in get_args(Role), "loopback_role", _ROLES)
        is_long = self.secret is None or len(self.secret.encode()) >= MIN_SECRET
        way = "python -c 'import secrets; print(secrets.token_hex(32))' makes one"
        _check(is_long, "secret", f"takes at least {MIN_SECRET} bytes: {way}")
        for name in ("proxies", "operators", "hosts"):
            _check(not isinstance(getattr(self, name), str), name, "takes a list of texts")
        self.proxy_networks  # noqa: B018 - raises if one of them is wrong
        is_url = self.management is None or parts_of_url(str(self.management)) is not None
        _check(is_url, "management", "takes a URL such as http://user:password@host:15672")

    @property
    def proxy_networks(self) -> list[IPv4Network | IPv6Network]:
        """The networks of the proxies."""
        try:
            return [ip_network(each) for each in self.proxies]
        except ValueError as wrong:
            _check(False, "proxies", f"takes addresses and networks: {wrong}")
            raise

    @property
    def is_open(self) -> bool:
        """Whether users are not distinguished, so that only this machine is answered."""
        return self.users is None and self.proxy_header is None and self.identify is None

    def shown(self, task: str, text: str | None) -> str | None:
        """Return the text of a task's arguments as far as it may be shown; None if it may not."""
        if not self.shows_arguments or text is None or self.mask is None:
            return text if self.shows_arguments else None
        try:
            return str(self.mask(task, text))
        except Exception:
            logger.exception("The mask has failed; arguments of %.200r are hidden", task)
            return None


def _check_user(name: str, user: Mapping[str, str]) -> None:
    is_user = name and isinstance(user, Mapping) and not user.keys() - {"password", "role"}
    _check(is_user, "users", f"user {name!r} takes a password and a role")
    way = "`celery rabbitdelay web --hash-password` makes one"
    is_hashed = is_hash(user.get("password"))
    _check(is_hashed, "users", f"the password of user {name!r} is not hashed: {way}")
    has_role = user.get("role", "viewer") in get_args(Role)
    _check(has_role, "users", f"the role of user {name!r} {_ROLES}")


def _check(is_right: object, name: str, takes: str) -> None:
    """Raise the error about an option, without its value, which may be a secret."""
    if not is_right:
        raise InvalidSetting(f"{SETTING}[{name!r}]", HIDDEN, takes)


def hash_password(password: str) -> str:
    """Return the hash of a password, with its salt and its cost."""
    salt = secrets.token_bytes(16)
    return ":".join(
        ("scrypt", str(_N), str(_R), str(_P), _text(salt), _text(_hash(password, salt)))
    )


def is_hash(value: object) -> bool:
    """Return whether a value is what :func:`hash_password` returns, perhaps at another cost."""
    found = _HASH.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return False
    n, r, p = map(int, found.groups()[:3])
    return n.bit_count() == 1 < n and min(r, p) > 0 and 128 * r * (n + p + 2) <= _MEMORY


def is_password(password: str, hashed: str) -> bool:
    """Return whether a password has a hash; it takes as long for a wrong one."""
    found = _HASH.fullmatch(hashed)
    if found is None:
        return False
    *cost, salted, hashed_as = found.groups()
    salt, wanted = base64.urlsafe_b64decode(salted), base64.urlsafe_b64decode(hashed_as)
    return hmac.compare_digest(_hash(password, salt, *map(int, cost)), wanted)


def _hash(password: str, salt: bytes, n: int = _N, r: int = _R, p: int = _P) -> bytes:
    encoded = password.encode("utf-8", "surrogatepass")
    return hashlib.scrypt(encoded, salt=salt, n=n, r=r, p=p, maxmem=_MEMORY, dklen=32)


def _text(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).decode()
