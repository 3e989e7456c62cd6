"""What the documentation says about the tests, the names on the broker and the API is true."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from kombu import Queue

import celery_rabbitdelay
import celery_rabbitdelay.exceptions
import celery_rabbitdelay.kombu
import celery_rabbitdelay.testing
from celery_rabbitdelay import NoPublisherFree, PublishError
from celery_rabbitdelay.app.settings import Settings
from celery_rabbitdelay.kombu import Topology

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
DOCS = ROOT / "docs"
SENDERS = DOCS / "reference" / "senders.md"
NAMES = DOCS / "reference" / "names.md"
API = DOCS / "reference" / "api.md"
EXCEPTIONS = DOCS / "reference" / "exceptions.md"
LAYOUT = DOCS / "how-to" / "layout.md"
SETTINGS = DOCS / "reference" / "settings.md"
ERRORS = DOCS / "how-to" / "publish_errors.md"

#: How the reference calls the queues of a topology.
KINDS = ("digits", "meditation", "check-in", "distribution", "undeliverable", "paused", "probe")


def test_each_row_of_the_table_of_senders_names_a_file_of_tests() -> None:
    rows = [line for line in SENDERS.read_text().splitlines() if line.startswith("| ")]
    assert len(rows) > 30
    for row in rows:
        if not row.endswith("shown by |"):
            [file] = re.findall(r"`((?:integration|unit)/test_\w+\.py)` \|$", row)
            assert (TESTS / file).is_file(), file


def test_the_queues_are_as_many_as_the_reference_says() -> None:
    topology, page = Topology(), NAMES.read_text()
    [total, digits] = re.findall(r"declare (\d+) queues: (\d+) digit queues", page)[0]
    declared = (*topology.queues, topology.probe)
    assert (int(total), int(digits)) == (len(declared), len(topology.digit_queues))
    for level, queues in topology.level_queues.items():
        row = f"| `rabbitdelay.{level}` | `{queues[0].name}` to `{queues[-1].name}` |"
        assert f"{row} {len(queues)} |" in page


def test_the_table_of_layouts_counts_queues_levels_and_days() -> None:
    tables = re.findall(
        r"^\| (`.*) \| (\d+) \| (\d+) \| ([\d,]+) days \|$", LAYOUT.read_text(), re.M
    )
    assert len(tables) == 6
    for setting, levels, queues, days in tables:
        layout, *tick = re.findall(r"`(?:rabbitdelay_tick = )?(.+?)`", setting)
        own = {"tick": ast.literal_eval(tick[0])} if tick else {}
        found = Settings(layout=ast.literal_eval(layout), **own).topology
        assert (len(found.layout.levels), len(found.digit_queues)) == (int(levels), int(queues))
        assert int(found.layout.capacity_ms / 86_400_000 + 0.001) == int(days.replace(",", ""))


@pytest.mark.parametrize("queue_type", ["quorum", "classic"])
def test_the_reference_has_every_argument_of_every_queue(queue_type: Any) -> None:
    topology = Topology(queue_type=queue_type)
    queues: dict[str, Queue] = {
        "digits": topology.digit_queues[0],
        "meditation": topology.module_queues.meditation,
        "check-in": topology.module_queues.checkin,
        "distribution": topology.module_queues.distribution,
        "undeliverable": topology.module_queues.undeliverable,
        "paused": topology.module_queues.paused,
        "probe": topology.probe,
    }
    section = NAMES.read_text().partition("## Arguments of the queues")[2]
    told: dict[str, set[str]] = {kind: set() for kind in KINDS}
    for argument, whose in re.findall(r"^\| `(x-[\w-]+)` \| ([^|]+) \|", section, re.MULTILINE):
        which, _, only = whose.partition("; ")
        if only and queue_type == "classic":
            continue
        which, _, but = which.partition(" but ")
        for kind in KINDS if which.strip() == "all" else which.strip().split(", "):
            if kind not in but.strip().split(" and "):
                told[kind].add(argument)
    assert told == {kind: set(queue.queue_arguments or ()) for kind, queue in queues.items()}


def test_the_reference_has_every_setting() -> None:
    rows = re.findall(r"^\| `(rabbitdelay_\w+)` \| `(.+?)` \|", SETTINGS.read_text(), re.MULTILINE)
    defaults = {key.removeprefix("rabbitdelay_"): ast.literal_eval(value) for key, value in rows}
    assert Settings(**defaults) == Settings()
    assert defaults.keys() == {setting.name for setting in fields(Settings)}


def test_the_page_of_the_api_has_every_public_name() -> None:
    page = API.read_text()
    directive = r"auto(?:class|function|exception):: {}\.([A-Za-z_]+)$"
    for module in (celery_rabbitdelay, celery_rabbitdelay.kombu, celery_rabbitdelay.testing):
        public = set(module.__all__) - set(celery_rabbitdelay.exceptions.__all__) - {"__version__"}
        modules = {name for name in public if inspect.ismodule(getattr(module, name))}
        for name in modules:
            assert f".. automodule:: {getattr(module, name).__name__}\n" in page
        told = re.findall(directive.format(re.escape(module.__name__)), page, re.MULTILINE)
        assert set(told) == public - modules


def test_the_page_on_errors_says_of_each_whether_the_broker_may_have_the_message() -> None:
    rows = re.findall(r"^\| `(\w+)`[^|]* \| `(True|False)`([^|]*) \|", ERRORS.read_text(), re.M)
    told = {name: (value, more.strip()) for name, value, more in rows}
    kinds = [vars(celery_rabbitdelay.exceptions)[name] for name in told]
    publishing = {PublishError, *PublishError.__subclasses__(), NoPublisherFree}
    assert set(kinds) == publishing
    for kind in kinds:
        value, more = told[kind.__name__]
        # Only after an earlier attempt, or only if it was written, is the other one possible.
        assert more or kind is NoPublisherFree
        assert not kind.may_have_arrived
        assert value == "False" or more.startswith("if it was written")
        if kind is not PublishError:
            assert re.search(r"written|does not have it|nothing was sent", kind.__doc__), kind


def test_each_link_of_the_pages_on_top_leads_to_a_file() -> None:
    for page in ("README.md", "CONTRIBUTING.md"):
        text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
        targets = re.findall(r"\]\(([^)#\s]+)", text)
        assert targets, page
        for target in targets:
            if not target.startswith("https://"):
                assert (ROOT / target).exists(), f"{page} links to {target}"


def test_contributing_names_each_target_of_make() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"^\| `make ([a-z-]+)`", (ROOT / "CONTRIBUTING.md").read_text(), re.M))
    assert named == targets


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/explanation/architecture.md"])
def test_a_page_on_the_code_names_files_that_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    files = re.findall(r"`([\w/]+\.(?:py|lua))`", text.partition("## Which tests")[0])
    assert len(files) > 10
    for file in files:
        folder = ROOT if file.startswith("tests/") else ROOT / "celery_rabbitdelay"
        assert (folder / file).is_file(), file
    for pattern in re.findall(r"`(tests/[\w/*]+\.py)`", text):
        assert "_name" in pattern or list(ROOT.glob(pattern)), pattern
