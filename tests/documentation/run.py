"""Run the code blocks of one page in their order: ``python -m tests.documentation.run PAGE``.

The current folder is the page's own, with an application in ``shop.py``. What a page says of
``amqp://`` goes to ``CELERY_BROKER_URL``. The exit status is 0 if every block could be run and
printed what the page shows.
"""

import doctest
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from celery_rabbitdelay.testing import Server, wait_for
from tests.documentation.page import Block, blocks

#: Seconds that one command of a page may take.
TIMEOUT: Final = 300

_ID: Final = re.compile(r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
_PORT: Final = re.compile(r"(?<=127\.0\.0\.1:)\d+")
_HOST: Final = re.compile(r"\b\w+@[\w.-]+")
_NUMBER: Final = re.compile(r"\d[\d,.:]*")


class PageFailed(Exception):
    """A block did not do what the page says."""


class CommandServer(Server):
    """A worker, by its command line.

    Args:
        command: The command line.
        folder: Where it runs.
        environment: Its environment.
    """

    package = "celery"

    def __init__(self, command: str, folder: Path, environment: Mapping[str, str]) -> None:
        super().__init__()
        # Only from this level on, a worker says that it is ready.
        level = "" if "loglevel" in command else " --loglevel=INFO"
        self._line, self._variables = f"cd {folder} && exec {command}{level}", environment

    def _command(self) -> list[str]:
        return ["bash", "-c", self._line]

    def _environment(self) -> dict[str, str]:
        return dict(self._variables)

    def _ready(self) -> bool:
        return " ready." in self.log


class _Checker(doctest.OutputChecker):
    """Takes any id for any other id, and any port of this machine for any other."""

    def __init__(self) -> None:
        self.ports: dict[str, str] = {}

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        self.ports.update(zip(_PORT.findall(want), _PORT.findall(got), strict=False))
        want, got = (_PORT.sub("PORT", _ID.sub("ID", text)) for text in (want, got))
        return super().check_output(want, got, optionflags)


class _Page:
    """A page that is run; it ends with :meth:`close`."""

    def __init__(self) -> None:
        self._namespace: dict[str, Any] = {"__name__": "__main__"}
        self._checker = _Checker()
        self._worker: CommandServer | None = None

    def run(self, block: Block) -> None:
        """Do what a block says."""
        code = self._with_this_machine_s_addresses(block.code)
        match block.action:
            case "python":
                source = "\n" * (block.line - 1) + code
                exec(compile(source, block.page, "exec"), self._namespace)
            case "pycon":
                self._run_session(code, block)
            case "console":
                for command, shown in commands(code):
                    self._run_command(command, shown)
            case "file":
                with Path(block.argument).open("a") as file:
                    file.write(code)
            case "json":
                json.loads(code)
            case "toml":
                tomllib.loads(code)

    def close(self) -> None:
        """End what the page has left running."""
        if self._worker is not None:
            self._worker.kill()
            self._worker.stop()

    def _with_this_machine_s_addresses(self, code: str) -> str:
        url = os.environ["CELERY_BROKER_URL"]
        for shown in ('"amqp://"', '"amqp://guest:guest@localhost"'):
            code = code.replace(shown, f'"{url}"')
        code = code.replace("=amqp://guest:guest@localhost ", f"={url} ")
        return _PORT.sub(lambda port: self._checker.ports.get(port[0], port[0]), code)

    def _run_session(self, code: str, block: Block) -> None:
        test = doctest.DocTestParser().get_doctest(
            code, {}, str(block.page), str(block.page), block.line - 1
        )
        test.globs = self._namespace
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        runner = doctest.DocTestRunner(checker=self._checker, optionflags=flags)
        if runner.run(test, clear_globs=False).failed:
            raise PageFailed("the session printed something else")

    def _run_command(self, command: str, shown: list[str]) -> None:
        if re.match(r"celery .*\bworker\b", command):
            self.close()
            self._worker = CommandServer(command, Path.cwd(), os.environ)
            self._worker.start()
            worker = self._worker
            wait_for(lambda: not _lacking(shown, worker.log), f"{command}: {shown}", TIMEOUT)
            return
        variables = Path(os.environ["TMPDIR"], "variables")
        script = f"{command}\nstatus=$?; env --null >{variables}; exit $status"
        done = subprocess.run(
            ["bash", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        lacking = _lacking(shown, done.stdout)
        if done.returncode or lacking:
            raise PageFailed(f"$ {command}\n{done.stdout}\nstatus {done.returncode}, {lacking=}")
        # What it exports, the commands and the sessions of the page see from here on.
        for variable in filter(None, variables.read_text().split("\0")):
            name, _, value = variable.partition("=")
            os.environ[name] = value


def commands(code: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the commands of a session at a terminal, each with the lines that it prints."""
    for part in re.split(r"^\$ ", code, flags=re.MULTILINE)[1:]:
        command, *shown = part.replace("\\\n", " ").splitlines()
        yield command.partition("  #")[0], [line for line in shown if line.strip()]


def _lacking(shown: list[str], printed: str) -> list[str]:
    """The lines that a page shows and a program has not printed: other numbers are as good."""
    lines = [_shape(line) for line in printed.splitlines()]
    return [
        line
        for line in shown
        if not any(
            re.fullmatch(re.escape(_shape(line)).replace(r"\.\.\.", ".*"), found) for found in lines
        )
    ]


def _shape(line: str) -> str:
    line = _HOST.sub("HOST", _ID.sub("ID", line))
    return " ".join(_NUMBER.sub("0", line).split())


def main() -> None:
    """Run a page."""
    sys.path.insert(0, str(Path.cwd()))
    page = _Page()
    try:
        for block in blocks(Path(sys.argv[1])):
            sys.stderr.write(f"{block} {block.action}\n")
            page.run(block)
    finally:
        page.close()


if __name__ == "__main__":
    main()
