# ruff: noqa: T201  # a program at the terminal prints
"""Delete a room in a copy of the project, with those that stand on it; what is left has to work.

``python -m tests.without ROOM`` checks what is left: the contracts of imports, the types, the unit
tests, and one task that is delayed on a real broker, and another one that is cancelled if the
registry is left.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from celery_rabbitdelay.testing import RabbitMQServer, RedisServer, wait_for
from tests.project_copy import PASSED, REPOSITORY, project_copy, run_tests

#: The additions.
ADDITIONS: Final = ("registry", "schedules", "operations", "metrics", "spark", "testing", "web")

#: The folders of tests that belong to no room.
OF_ALL_ROOMS: Final = (
    *("benchmarks", "chaos", "documentation", "fuzz", "hostile", "mutation", "planted", "upgrade"),
    "whole",
)

#: The files of the kernel that name additions for type checkers, a line for each class.
NAMES_ADDITIONS: Final = tuple(
    f"celery_rabbitdelay/{name}.py" for name in ("__init__", "kombu", "app/extension")
)

#: Seconds that a task may take.
PATIENCE: Final = 60

#: An application, which the copy imports.
APPLICATION: Final = '''
"""What is left of the package delays a task."""

import json
import os

from celery_rabbitdelay import Celery

app = Celery("left")
app.conf.update(json.loads(os.environ["LEFT"]))


@app.task(name="write")
def write(path, text):
    with open(path, "a") as file:
        file.write(f"{text}\\n")
'''

#: What is sent, in a process of the copy. No file of an addition is imported for a plain delay.
SENDS: Final = """
import sys

from left import app, write

path = sys.argv[1]
write.apply_async((path, "delayed"), delay=1)
imported = [name for name in sys.modules if name.startswith("celery_rabbitdelay.")]
assert "redis" not in sys.modules or app.conf.get("rabbitdelay_registry_url"), imported
if app.conf.get("rabbitdelay_registry_url"):
    cancelled = write.apply_async((path, "cancelled"), delay=2, key="one")
    assert app.rabbitdelay.cancel(key="one").name == "DONE"
write.apply_async((path, "last"), delay=4)
"""


def deleted_with(room: str) -> set[str]:
    """Return a room and those that import it, directly or not."""
    package = REPOSITORY / "celery_rabbitdelay"
    pattern = re.compile(r"^ *from celery_rabbitdelay\.(\w+)", re.MULTILINE)
    stands_on = {
        each: {
            name
            for path in (package / each).rglob("*.py")
            for name in pattern.findall(path.read_text())
        }
        for each in ADDITIONS
    }
    deleted = {room}
    while more := {each for each, below in stands_on.items() if below & deleted} - deleted:
        deleted |= more
    return deleted


def delete(folder: Path, rooms: set[str]) -> None:
    """Delete rooms of a copy, and their tests."""
    for room in rooms:
        shutil.rmtree(folder / "celery_rabbitdelay" / room)
        shutil.rmtree(folder / "tests" / room, ignore_errors=True)
    for name in OF_ALL_ROOMS:
        shutil.rmtree(folder / "tests" / name)
    pattern = re.compile(rf"^ +from celery_rabbitdelay\.(?:{'|'.join(rooms)})\b.* import (.+)$")
    for name in NAMES_ADDITIONS:
        lines, names = [], set[str]()
        for line in (folder / name).read_text().splitlines(keepends=True):
            if found := pattern.match(line):
                names |= set(found[1].split(", "))
            elif line.strip().removesuffix(",") not in names:
                lines.append(line)
        text = re.sub(r"^if TYPE_CHECKING:\n(?! )", "", "".join(lines), flags=re.MULTILINE)
        (folder / name).write_text(text)
    contracts = folder / "pyproject.toml"
    text = contracts.read_text()
    for room in rooms:
        text = re.sub(rf'^ +"{room}",\n', "", text, flags=re.MULTILINE)
        text = re.sub(rf'"celery_rabbitdelay\.{room}"(?:, )?', "", text)
    text = text.replace("operations | metrics", " | ".join({"operations", "metrics"} - rooms))
    contracts.write_text(re.sub(r'^ +"",\n', "", text, flags=re.MULTILINE))


def failures(folder: Path, rooms: set[str]) -> Iterator[str]:
    """Yield what does not work in a copy."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    bin_folder = Path(sys.executable).parent
    left = [each for each in ("kernel", *ADDITIONS) if each not in rooms]
    unit_tests = [f"tests/{each}/unit" for each in left if (folder / "tests" / each).exists()]
    checks = {
        "the contracts of imports": [str(bin_folder / "lint-imports")],
        "the types": [str(bin_folder / "mypy"), "celery_rabbitdelay", *unit_tests],
    }
    for what, command in checks.items():
        run = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        if run.returncode:
            yield f"{what}: {(run.stdout + run.stderr)[-3000:]}"
    own = {}
    if "testing" in rooms:  # its plugin is installed, and pytest would load it
        own["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        unit_tests += ["-p", "pytest_timeout"]
    tests = run_tests(folder, *unit_tests, environment=own)
    if tests.code != PASSED:
        yield f"the unit tests: {tests.printed[-3000:]}"
    yield from failures_of_a_task(folder, has_registry="registry" not in rooms)


def failures_of_a_task(folder: Path, *, has_registry: bool) -> Iterator[str]:
    """Yield what becomes of a delayed task and of a cancelled one, if it is wrong."""
    (folder / "left.py").write_text(APPLICATION)
    written = folder / "written"
    with ExitStack() as stack:
        settings = {
            "broker_url": stack.enter_context(RabbitMQServer()).url,
            "rabbitdelay_layout": [["seconds", 6, 1], ["ms", 10, 0.1]],
        }
        if has_registry:
            settings["rabbitdelay_registry_url"] = stack.enter_context(RedisServer()).url
        environment = {**os.environ, "PYTHONPATH": str(folder), "LEFT": json.dumps(settings)}
        celery = [sys.executable, "-m", "celery", "-A", "left", "worker", "--pool=solo"]
        with (folder / "log").open("w") as log:
            worker = subprocess.Popen(celery, cwd=folder, env=environment, stdout=log, stderr=log)
        try:
            subprocess.run(
                [sys.executable, "-c", SENDS, str(written)],
                cwd=folder,
                env=environment,
                check=True,
                timeout=PATIENCE,
            )
            wait_for(lambda: written.exists() and "last" in written.read_text(), "tasks", PATIENCE)
        except (AssertionError, subprocess.SubprocessError) as error:
            yield f"a delayed task: {error}\n{(folder / 'log').read_text()[-3000:]}"
            return
        finally:
            worker.terminate()
            worker.wait(PATIENCE)
    if written.read_text().split() != ["delayed", "last"]:
        yield f"the tasks that ran: {written.read_text()}"


def main(room: str) -> int:
    """Delete a room, and those that stand on it; return how many checks fail."""
    rooms = deleted_with(room)
    print(f"without {', '.join(sorted(rooms))}", flush=True)
    with project_copy() as folder:
        delete(folder, rooms)
        failed = list(failures(folder, rooms))
    print("\n".join(failed) or "all that is left works")
    return len(failed)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
