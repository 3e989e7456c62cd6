"""What may be configured about the page: who may see it and act, and what it shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Any, Final, Literal, NamedTuple, Self, TypeAlias, get_args

from celery_rabbitdelay.exceptions import InvalidSetting
from celery_rabbitdelay.levels.shown_url import HIDDEN
from celery_rabbitdelay.publishing.management import parts_of_url
from celery_rabbitdelay.web.passwords import is_hash

#: A viewer reads; an operator also acts.
Role: TypeAlias = Literal["viewer", "operator"]

#: The setting that has the options; see :attr:`.Settings.web`.
SETTING: Final = "rabbitdelay_web"

#: Bytes of a secret at least.
MIN_SECRET: Final = 32


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


#: Returns who asks by the ASGI scope of the request; None if nobody may.
Identify: TypeAlias = Callable[[Mapping[str, Any]], User | None]

#: Returns the text that is shown for arguments, by the name of the task and their own text.
Mask: TypeAlias = Callable[[str, str], str]


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
    identify: Identify | None = None

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
    mask: Mask | None = None

    #: The URL of the broker's management API, http://user:password@host:15672. None: that of the
    #: broker's host, with its user.
    management: str | None = None

    @classmethod
    def of(cls, *given: Mapping[str, Any]) -> Self:
        """Read options; the later ones override the earlier."""
        merged = {name: value for each in given for name, value in each.items()}
        names = [each.name for each in fields(cls)]
        for name in merged.keys() - set(names):
            close = get_close_matches(name, names, 1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
            raise _invalid(name, f"no such option; {hint}")
        return cls(**merged)

    def __post_init__(self) -> None:
        ways = [self.users, self.proxy_header, self.identify]
        if sum(each is not None for each in ways) > 1:
            raise _invalid("users", "takes one of users, proxy_header and identify")
        self._check_users()
        if bool(self.proxy_header) != bool(self.proxies):
            raise _invalid("proxies", "proxy_header and proxies need each other")
        if self.identify is not None and not callable(self.identify):
            raise _invalid("identify", "takes a function of a request's ASGI scope")
        if self.mask is not None and not callable(self.mask):
            raise _invalid("mask", "takes a function of a task's name and a text")
        if self.loopback_role not in get_args(Role):
            raise _invalid("loopback_role", f"takes one of {', '.join(get_args(Role))}")
        if self.secret is not None and len(self.secret.encode()) < MIN_SECRET:
            raise _invalid(
                "secret",
                f"takes at least {MIN_SECRET} bytes: "
                "python -c 'import secrets; print(secrets.token_hex(32))' makes one",
            )
        for name in ("proxies", "operators", "hosts"):
            if isinstance(getattr(self, name), str):
                raise _invalid(name, "takes a list of texts")
        self.proxy_networks  # noqa: B018 - raises if one of them is none
        if self.management is not None and parts_of_url(str(self.management)) is None:
            raise _invalid("management", "takes a URL such as http://user:password@host:15672")

    def _check_users(self) -> None:
        for name, each in (self.users or {}).items():
            if not name or not isinstance(each, Mapping) or each.keys() - {"password", "role"}:
                raise _invalid("users", f"user {name!r} takes a password and a role")
            if not is_hash(each.get("password")):
                way = "`celery rabbitdelay web --hash-password` makes one"
                raise _invalid("users", f"the password of user {name!r} is not hashed: {way}")
            if each.get("role", "viewer") not in get_args(Role):
                roles = ", ".join(get_args(Role))
                raise _invalid("users", f"the role of user {name!r} takes one of {roles}")
        if self.users is not None and not self.users:
            raise _invalid("users", "takes at least one user")

    @property
    def proxy_networks(self) -> list[IPv4Network | IPv6Network]:
        """The networks of the proxies."""
        try:
            return [ip_network(each) for each in self.proxies]
        except ValueError as wrong:
            raise _invalid("proxies", f"takes addresses and networks: {wrong}") from wrong

    @property
    def is_open(self) -> bool:
        """Whether users are not distinguished, so that only this machine is answered."""
        return self.users is None and self.proxy_header is None and self.identify is None


def _invalid(name: str, takes: str) -> InvalidSetting:
    """Return the error about an option, without its value, which may be a secret."""
    return InvalidSetting(f"{SETTING}[{name!r}]", HIDDEN, takes)
