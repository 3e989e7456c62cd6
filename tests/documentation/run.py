"""Do what one page says, in the order of the page: ``python -m tests.documentation.run PAGE``.

The current folder is empty at the start. All Python of the page is typed into one session, all
commands into one terminal. The exit status is 0 if every block could be run and printed what the
page shows.
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

import yaml

from celery_rabbitdelay.testing import Server, wait_for
from tests.documentation.page import Block, blocks

#: Seconds that one command of a page may take.
TIMEOUT: Final = 300

_ID: Final = re.compile(r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b")
_PORT: Final = re.compile(r"(?<=127\.0\.0\.1:)\d+")
_SERVES: Final = re.compile(r"celery .*\b(worker|rabbitdelay web)\b|uvicorn |flask .*\brun\b")
_READS: Final = re.compile(r"(sudo )?rabbitmqctl .*\blist_|celery .* rabbitdelay status$")
_HOST: Final = re.compile(r"\b\w+@[\w.-]+")
_NUMBER: Final = re.compile(r"\d[\d,.:]*")


class PageFailed(Exception):
    """A block did not do what the page says."""


class CommandServer(Server):
    """A worker, or another program that runs until it is stopped, by its command line.

    Args:
        command: The command line.
        folder: Where it runs.
        environment: Its environment.
    """

    package = "celery"

    def __init__(self, command: str, folder: Path, environment: Mapping[str, str]) -> None:
        super().__init__()
        # Only from this level on, a worker says that it is ready.
        self._is_worker = " worker" in command
        level = " --loglevel=INFO" if self._is_worker and "loglevel" not in command else ""
        self._line, self._variables = f"cd {folder} && exec {command}{level}", environment

    def _command(self) -> list[str]:
        return ["bash", "-c", self._line]

    def _environment(self) -> dict[str, str]:
        return dict(self._variables)

    def _ready(self) -> bool:
        return " ready." in self.log if self._is_worker else bool(self.log)


class _Checker(doctest.OutputChecker):
    """Takes any id for any other id, and any port of this machine for any other."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        want, got = (_PORT.sub("PORT", _ID.sub("ID", text)) for text in (want, got))
        return super().check_output(want, got, optionflags)


class _Page:
    """A page that is run; it ends with :meth:`close`."""

    def __init__(self) -> None:
        self._namespace: dict[str, Any] = {"__name__": "__main__"}
        self._server: CommandServer | None = None

    def run(self, block: Block) -> None:
        """Do what a block says."""
        code = block.code
        match block.action:
            case "python":
                source = "\n" * (block.line - 1) + code
                exec(compile(source, block.page, "exec"), self._namespace)
            case "pycon":
                self._run_session(code, block)
            case "console":
                for command, shown in commands(code):
                    self._run_command(command, shown)
            case "file" | "continued":
                path = Path(block.argument)
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("w" if block.action == "file" else "a") as file:
                    file.write(code)
            case "json":
                json.loads(code)
            case "toml":
                tomllib.loads(code)
            case "yaml":
                list(yaml.safe_load_all(code))

    def close(self) -> None:
        """End what the page has left running."""
        if self._server is not None:
            self._server.kill()
            self._server.stop()
            self._server = None

    def _run_session(self, code: str, block: Block) -> None:
        test = doctest.DocTestParser().get_doctest(
            code, {}, str(block.page), str(block.page), block.line - 1
        )
        test.globs = self._namespace
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        runner = doctest.DocTestRunner(checker=_Checker(), optionflags=flags)
        if runner.run(test, clear_globs=False).failed:
            raise PageFailed("the session printed something else")

    def _run_command(self, command: str, shown: list[str]) -> None:
        if _SERVES.match(command):
            self.close()
            server = CommandServer(command, Path.cwd(), os.environ)
            self._server = server
            server.start()
            wait_for(lambda: not _lacking(shown, server.log), f"{command}: {shown}", TIMEOUT)
        elif _READS.match(command):
            # RabbitMQ's own figures are some seconds old, probes come later: a reader looks again.
            wait_for(lambda: not _lacking(shown, _output(command)), f"{command}: {shown}", TIMEOUT)
        else:
            printed = _output(command)
            if lacking := _lacking(shown, printed):
                raise PageFailed(f"$ {command}\n{printed}\n{lacking=}")


def _output(command: str) -> str:
    """Run a command to its end, and take over the variables that it exports."""
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
    if done.returncode:
        raise PageFailed(f"$ {command}\n{done.stdout}\nstatus {done.returncode}")
    for variable in filter(None, variables.read_text().split("\0")):
        name, _, value = variable.partition("=")
        os.environ[name] = value
    return done.stdout


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
