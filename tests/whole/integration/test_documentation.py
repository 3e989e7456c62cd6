"""A reader follows each page of README, CONTRIBUTING, CHANGELOG and docs, with that page alone.

For each page, the reader has an empty folder, an empty RabbitMQ on port 5672 (its management API on
15672) and an empty Redis on port 6379, as the pages say. ``tests/documentation/machine`` leads
these ports to the tests' servers in Python. Programs in other languages, such as ``rabbitmqctl``,
are called through scripts that know the servers. The reader does what the page shows, in its order,
and nothing else:

- A block whose first line is ``# NAME`` is saved as that file; one with
  ``# NAME, continued`` is added to it.
- A link whose text is a file's name, ``[`shop.py`](other.md#section)``, makes the reader save that
  file from the section of the other page.
- ``python`` and ``pycon`` are typed into one Python session. A ``pycon`` block has to print what it
  shows, with any task id and any port.
- ``console``: each command that follows a ``$`` has to end with status 0, and to print each line
  that is shown, with these numbers or others. Workers and web servers run until the page ends or
  starts another one. ``make`` only says what it would do, and ``.venv/bin/pytest`` which tests of a
  file it would run; ``sudo`` does nothing by itself.
- ``json``, ``toml`` and ``yaml`` are parsed. ``text`` is output or a drawing; directives are
  Sphinx's.

Comments right above a block say why it is not run here. They hold no code:

- ``<!-- not run: the reason -->``
- ``<!-- from: PATH -->``: the block is part of this file, or of a Python file in this folder of the
  repository, which other tests run.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from celery_rabbitdelay.testing import RedisServer
from tests import node_control
from tests.documentation.page import RUN, blocks
from tests.private_broker import QUIET
from tests.rabbitmq_node import RabbitMQNode

REPOSITORY = Path(__file__).resolve().parents[3]
MACHINE = REPOSITORY / "tests" / "documentation" / "machine"

PAGES = sorted(
    page.relative_to(REPOSITORY)
    for page in (
        *REPOSITORY.glob("*.md"),
        *REPOSITORY.glob("example_project/**/*.md"),
        *REPOSITORY.glob("docs/**/*.md"),
    )
)


@pytest.fixture(scope="module")
def rabbitmq(broker_root: Path | None) -> Iterator[RabbitMQNode]:
    """The RabbitMQ of the readers' machine."""
    with RabbitMQNode(broker_root, QUIET, management=True) as node:
        yield node


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    """The Redis of the readers' machine."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def machine(rabbitmq: RabbitMQNode, redis_server: RedisServer, tmp_path: Path) -> dict[str, str]:
    """The environment of a reader, whose servers are empty."""
    node_control.delete_virtual_host(rabbitmq, "/")
    node_control.add_virtual_host(rabbitmq, "/")
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    programs, scratch = tmp_path / "programs", tmp_path / "scratch"
    scratch.mkdir()
    python = f"exec {shlex.quote(sys.executable)}"
    control = shlex.join(rabbitmq._inside(["/usr/lib/rabbitmq/bin/rabbitmqctl"]))
    variables = shlex.join(f"{name}={value}" for name, value in rabbitmq._environment().items())
    _program(programs / "python", f'{python} "$@"')
    for name in ("celery", "flask", "uvicorn", "django-admin"):
        module = {"django-admin": "django"}.get(name, name)
        _program(programs / name, f'{python} -m {module} "$@"')
    _program(programs / "pytest", f'{python} -m pytest -p no:cacheprovider "$@"')
    _program(programs / "sudo", 'exec "$@"')
    _program(programs / "make", f'exec /usr/bin/make --dry-run -C {REPOSITORY} "$@"')
    # A node in another root does not see the reader's files.
    given = '[ "$1" = import_definitions ] && exec < "$2" && set -- "$1"'
    _program(programs / "rabbitmqctl", f'{given}\nexec env {variables} {control} "$@"')
    _program(programs / "redis-cli", f'exec /usr/bin/redis-cli -p {redis_server.port} "$@"')
    moved = f'"${{@/@localhost/@127.0.0.1:{rabbitmq.port}}}"'
    _program(programs / "amqp-publish", f"exec /usr/bin/amqp-publish {moved}")
    ports = {5672: rabbitmq.port, 15672: rabbitmq._management_port, 6379: redis_server.port}
    return {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": f"{MACHINE}:{REPOSITORY}",
        "READER_PORTS": json.dumps(ports),
        "TMPDIR": str(scratch),
        "C_FORCE_ROOT": "1",
    }


def _program(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_a_reader_of_a_page_gets_what_the_page_shows(
    page: Path, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    found = blocks(REPOSITORY / page)
    for block in found:
        if block.action == "from":
            path = REPOSITORY / block.argument
            sources = [path] if path.is_file() else list(path.rglob("*.py"))
            assert any(block.code in source.read_text() for source in sources), block
    if not any(block.action in RUN for block in found):
        return
    folder = tmp_path / "page"
    folder.mkdir()
    collect = f"""
        cd {REPOSITORY}
        [ -d "$1" ] || exec {shlex.quote(sys.executable)} -m pytest --co -q "$@"
    """
    if page.name == "CONTRIBUTING.md":
        _program(folder / ".venv" / "bin" / "pytest", collect)
    done = subprocess.run(
        [sys.executable, "-m", "tests.documentation.run", str(REPOSITORY / page)],
        cwd=folder,
        env=request.getfixturevalue("machine"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, f"{page}\n{done.stdout}"
