"""The options of the web page, such as its users and their roles; password hashes."""

from __future__ import annotations

import hashlib
import logging
import re
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

#: The setting with the options; see :attr:`.WebSettings.web`.
SETTING: Final = "rabbitdelay_web"

_ROLES: Final = f"takes one of {', '.join(get_args(Role))}"

_HASH: Final = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)


class User(NamedTuple):
    """A user of the page.

    Attributes:
        name: The user's name, for the log.
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
    """The options of the page.

    Without any of ``users``, ``proxy_header`` and ``identify``, the page serves only this machine.

    Raises:
        InvalidSetting: An option is invalid.
    """

    #: The users, who sign in by HTTP Basic authentication:
    #: ``{"ada": {"password": "sha256:...", "role": "operator"}}``. The default role is "viewer".
    #: ``celery rabbitdelay web --new-password`` makes a password and prints its hash.
    users: Mapping[str, Mapping[str, str]] | None = None

    #: The header in which a proxy names the authenticated user, such as "X-Remote-User".
    proxy_header: str | None = None

    #: The addresses or networks of that proxy, such as "10.0.0.5" or "10.1.0.0/16". Requests from
    #: other addresses are refused.
    proxies: Sequence[str] = ()

    #: The users of the proxy that are operators; all other users are viewers.
    operators: Sequence[str] = ()

    #: A function that takes the ASGI scope of a request and returns a :class:`User`, or None to
    #: refuse the request; it is called in a thread.
    identify: Callable[[Mapping[str, Any]], User | None] | None = None

    #: The role of all users if the page serves only this machine: "viewer" or "operator".
    loopback_role: Role = "viewer"

    #: The host names of the page, such as "tasks.example.com". None: any name if users are
    #: identified, otherwise only the names of this machine.
    hosts: Sequence[str] | None = None

    #: Whether the page shows the arguments of tasks and the bodies of messages.
    shows_arguments: bool = False

    #: A function that takes a task's name and the text of its arguments, and returns the text to
    #: show. If the function raises, the arguments are hidden.
    mask: Callable[[str, str], str] | None = None

    #: The URL of the broker's management API, http://user:password@host:15672. None: the broker's
    #: host, with the application's user.
    management: str | None = None

    @classmethod
    def of(cls, *given: Mapping[str, Any]) -> Self:
        """Merge mappings of options; later mappings override earlier ones."""
        merged = {name: value for each in given for name, value in each.items()}
        names = [each.name for each in fields(cls)]
        for name in merged:
            _check(name in names, name, f"no such option; the options are {', '.join(names)}")
        return cls(**merged)

    def __post_init__(self) -> None:
        ways = [self.users, self.proxy_header, self.identify]
        is_one = sum(each is not None for each in ways) <= 1
        _check(is_one, "users", "set only one of users, proxy_header and identify")
        _check(self.users is None or self.users, "users", "takes at least one user")
        for name, user in (self.users or {}).items():
            _check_user(name, user)
        has_both = bool(self.proxy_header) == bool(self.proxies)
        _check(has_both, "proxies", "set both proxy_header and proxies, or neither")
        _check(callable(self.identify or bool), "identify", "takes a function of an ASGI scope")
        _check(callable(self.mask or bool), "mask", "takes a function of a task's name and a text")
        _check(self.loopback_role in get_args(Role), "loopback_role", _ROLES)
        for name in ("proxies", "operators", "hosts"):
            _check(not isinstance(getattr(self, name), str), name, "takes a list of strings")
        self.proxy_networks  # noqa: B018 - raises if a network is wrong
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
        """Whether no option identifies users, so the page serves only this machine."""
        return self.users is None and self.proxy_header is None and self.identify is None

    def shown(self, task: str, text: str | None) -> str | None:
        """Return the text of a task's arguments, masked; None if arguments are hidden."""
        if not self.shows_arguments or text is None or self.mask is None:
            return text if self.shows_arguments else None
        try:
            return str(self.mask(task, text))
        except Exception:
            logger.exception(
                "rabbitdelay web: the function 'mask' has failed; arguments of %.200r are hidden",
                task,
            )
            return None


def _check_user(name: str, user: Mapping[str, str]) -> None:
    is_user = name and isinstance(user, Mapping) and not user.keys() - {"password", "role"}
    _check(is_user, "users", f"user {name!r} takes a password and a role")
    has_colon = f"the name {name!r} has a colon, which HTTP Basic authentication does not allow"
    _check(":" not in str(name), "users", has_colon)
    way = "`celery rabbitdelay web --new-password` makes a password and prints its hash"
    is_hashed = _HASH.fullmatch(str(user.get("password")))
    _check(is_hashed, "users", f"the password of user {name!r} is not hashed: {way}")
    has_role = user.get("role", "viewer") in get_args(Role)
    _check(has_role, "users", f"the role of user {name!r} {_ROLES}")


def _check(is_right: object, name: str, takes: str) -> None:
    """Raise an error if an option is invalid; hide its value, which may be a secret."""
    if not is_right:
        raise InvalidSetting(f"{SETTING}[{name!r}]", HIDDEN, takes)


def hash_of(password: str) -> str:
    """Hash a password.

    The passwords that ``--new-password`` makes are too random to guess. So a fast hash without a
    salt is enough, and the number of attempts needs no limit.
    """
    return f"sha256:{hashlib.sha256(password.encode()).hexdigest()}"
