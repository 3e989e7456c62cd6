"""Every code block of README, CONTRIBUTING, CHANGELOG and docs is run, or says why it is not.

The blocks of a page run in their order, in one process and one namespace, against the RabbitMQ and
the Redis of the tests. The current folder holds ``tests/documentation/shop.py`` as ``shop.py``,
unless the page has a file of that name.

- ``python`` is executed, ``pycon`` is a doctest, in which any task id and any port will do.
- ``console``: each command that follows a ``$`` has to end with status 0, and to print each line
  that is shown, with these numbers or others. ``celery worker`` runs until the page ends or
  starts another one. ``make`` only says what it would do, and ``.venv/bin/pytest`` which tests of a
  file it would run; ``sudo`` does nothing by itself.
- ``json`` and ``toml`` are parsed. ``text`` is output or a drawing; directives are Sphinx's.

A page says more in comments, which neither GitHub nor Sphinx shows, right above a block:

- ``<!-- not run: the reason -->``: the block is not run.
- ``<!-- file: NAME -->``: the block is saved under this name, or added to the file.
- ``<!-- from: PATH -->``: the block is part of this file, or of a Python file in this folder of the
  repository, which other tests run.
- ``<!-- file: NAME`` or ``<!-- run:``, and code in the lines up to ``-->``: the same for code that
  readers do not need to see. ``<!-- run: ... -->`` in one line may be a ``$`` command as well.
"""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documentation.page import RUN, blocks
from tests.kernel.integration import trouble
from tests.rabbitmq_node import RabbitMQNode

REPOSITORY = Path(__file__).resolve().parents[3]
APPLICATION = REPOSITORY / "tests" / "documentation" / "shop.py"
VIRTUAL_HOST = "documentation"

PAGES = sorted(
    page.relative_to(REPOSITORY)
    for page in (
        *REPOSITORY.glob("*.md"),
        *REPOSITORY.glob("example_project/**/*.md"),
        *REPOSITORY.glob("docs/**/*.md"),
    )
)


@pytest.fixture(scope="module")
def virtual_host(session_rabbitmq: RabbitMQNode) -> Iterator[str]:
    """The URL of a virtual host of the pages' own: they use the default names."""
    with trouble.virtual_host(session_rabbitmq, VIRTUAL_HOST) as url:
        yield url


@pytest.fixture(scope="module")
def programs(session_rabbitmq: RabbitMQNode, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the programs that pages call by name."""
    folder = tmp_path_factory.mktemp("programs")
    python = f"exec {shlex.quote(sys.executable)} -m"
    node = shlex.join(session_rabbitmq._inside(["/usr/lib/rabbitmq/bin/rabbitmqctl"]))
    variables = shlex.join(f"{k}={v}" for k, v in session_rabbitmq._environment().items())
    _program(folder / "celery", f'{python} celery "$@"')
    _program(folder / "pytest", f'{python} pytest -p no:cacheprovider "$@"')
    _program(folder / "sudo", 'exec "$@"')
    _program(folder / "make", f'exec /usr/bin/make --dry-run -C {REPOSITORY} "$@"')
    _program(
        folder / "rabbitmqctl",
        f"""
        case "$*" in
            *list_queues*) set -- "$@" --vhost {VIRTUAL_HOST} ;;
            *"--vhost / "*) shift; shift; shift; set -- set_permissions --vhost {VIRTUAL_HOST} "$@"
        esac
        exec env {variables} {node} "$@"
        """,
    )
    return folder


def _program(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_the_code_of_a_page_does_what_the_page_says(
    page: Path, virtual_host: str, redis_url: str, programs: Path, tmp_path: Path
) -> None:
    found = blocks(REPOSITORY / page)
    for block in found:
        if block.action == "from":
            path = REPOSITORY / block.argument
            sources = [path] if path.is_file() else list(path.rglob("*.py"))
            assert any(block.code in source.read_text() for source in sources), block
    if not any(block.action in RUN for block in found):
        return
    folder, scratch = tmp_path / "page", tmp_path / "scratch"
    folder.mkdir()
    scratch.mkdir()
    if not any((block.action, block.argument) == ("file", "shop.py") for block in found):
        shutil.copy(APPLICATION, folder / "shop.py")
    collect = f"""
        cd {REPOSITORY}
        [ -d "$1" ] || exec {shlex.quote(sys.executable)} -m pytest --co -q "$@"
    """
    _program(folder / ".venv" / "bin" / "pytest", collect)
    done = subprocess.run(
        [sys.executable, "-m", "tests.documentation.run", str(REPOSITORY / page)],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(REPOSITORY),
            "CELERY_BROKER_URL": virtual_host,
            "CELERY_RESULT_BACKEND": redis_url,
            "TMPDIR": str(scratch),
            "C_FORCE_ROOT": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, f"{page}\n{done.stdout}"
