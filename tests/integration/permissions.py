"""A virtual host whose users have the permissions that a test gives them, and no others."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from celery_rabbitdelay.operations.permissions import Right, TopicRight, patterns
from celery_rabbitdelay.testing import RabbitMQServer
from tests.integration.management import Place, created

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "permissions.md"


class Host(Place):
    """A virtual host of a test's own.

    Args:
        node: A node with its management API.
    """

    def url_of(self, user: str) -> str:
        """Return the URL for a user that :meth:`let` has made."""
        return self.url.replace("guest:guest", f"{self._named(user)}:secret")

    def let(self, user: str, given: Iterable[Right], topics: Iterable[TopicRight] = ()) -> str:
        """Give a user permissions, in place of all former ones; return its URL."""
        self._add(user)
        configure, write, read = patterns(given)
        name = self._named(user)
        self.put("permissions", self.name, name, configure=configure, write=write, read=read)
        for exchange, key in topics:
            self.put("topic-permissions", self.name, name, exchange=exchange, write=key, read="")
        return self.url_of(user)

    def apply(self, line: str, by_program: bool = False) -> list[Any]:
        """Do what a line of the page says, for this virtual host and a user of this test's own.

        Args:
            line: The line, a command of ``rabbitmqctl``.
            by_program: Run that; otherwise, the management API does the same in a moment.

        Returns:
            The permissions of that kind, which the user has then.
        """
        program, command, *arguments = shlex.split(line)
        assert (program, arguments[:2]) == ("rabbitmqctl", ["-p", "/"]), line
        user, *rest = arguments[2:]
        name, kind = self._named(user), command.removeprefix("set_").replace("_", "-")
        self._add(user)
        names = ("exchange", "write", "read") if "topic" in kind else ("configure", "write", "read")
        if by_program:
            self.node.ctl(command, "-p", self.name, name, *rest)
        else:
            self.put(kind, self.name, name, **dict(zip(names, rest, strict=True)))
        found: list[Any] = self.api.get("users", name, kind)
        return found

    def _named(self, user: str) -> str:
        return f"{user}-{self.name}"

    def _add(self, user: str) -> None:
        self.put("users", self._named(user), password="secret", tags="")


@contextmanager
def host_on(node: RabbitMQServer) -> Iterator[Host]:
    """A virtual host with nothing in it, deleted at the end with its users."""
    with created(Host(node)) as host:
        yield host
        users: list[dict[str, Any]] = host.api.get("users")
        for each in users:
            if each["name"].endswith(host.name):
                host.delete("users", each["name"])


def lines_of_page() -> list[str]:
    """Return the commands of the page about permissions, in their order."""
    return re.findall(r"^\$ (rabbitmqctl set_\w*permissions .*)$", PAGE.read_text(), re.MULTILINE)


def lines_for(user: str) -> list[str]:
    """Return the commands of the page for a user."""
    return [line for line in lines_of_page() if shlex.split(line)[4] == user]
