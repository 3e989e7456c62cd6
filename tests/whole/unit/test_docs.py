"""What the documentation says about the tests, the names on the broker and the API is true."""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from fnmatch import fnmatchcase
from pathlib import Path

import click
import yaml

import celery_rabbitdelay
import celery_rabbitdelay.additions
import celery_rabbitdelay.exceptions
import celery_rabbitdelay.kombu
import celery_rabbitdelay.testing
from celery_rabbitdelay.app import additions
from celery_rabbitdelay.app.settings import Settings
from celery_rabbitdelay.command.group import rabbitdelay
from celery_rabbitdelay.exceptions import RabbitDelayError
from celery_rabbitdelay.kombu import Topology
from celery_rabbitdelay.levels import headers
from celery_rabbitdelay.metrics.instruments import INSTRUMENTS
from celery_rabbitdelay.metrics.settings import MetricsSettings

TESTS = Path(__file__).resolve().parents[2]
ROOT = TESTS.parent
DOCS = ROOT / "docs"
NAMES = DOCS / "reference" / "names.md"
API = DOCS / "reference" / "api.md"
SETTINGS = DOCS / "reference" / "settings.md"

#: How the reference calls the queues of a topology.
KINDS = ("digits", "meditation", "check-in", "distribution", "undeliverable", "paused", "probe")


def test_the_table_of_senders_names_files_of_tests() -> None:
    page = (TESTS / "senders.md").read_text()
    files = re.findall(r"`(\w+/(?:integration|unit)/test_\w+\.py)` \|$", page, re.MULTILINE)
    assert len(files) > 30
    assert [file for file in files if not (TESTS / file).is_file()] == []


def test_the_reference_has_every_queue_and_its_arguments() -> None:
    topology, page = Topology(), NAMES.read_text()
    [total, digits] = re.findall(r"declare (\d+) queues: (\d+) digit queues", page)[0]
    assert (int(total), int(digits)) == (len(topology.queues) + 1, len(topology.digit_queues))
    for level, of_level in topology.level_queues.items():
        row = f"| `rabbitdelay.{level}` | `{of_level[0].name}` to `{of_level[-1].name}` |"
        assert f"{row} {len(of_level)} |" in page
    modules = {kind: getattr(topology.module_queues, kind.replace("-", "")) for kind in KINDS[1:-1]}
    queues = {"digits": topology.digit_queues[0], **modules, "probe": topology.probe}
    told: dict[str, set[str]] = {kind: set() for kind in KINDS}
    section = page.partition("## Arguments of the queues")[2]
    for argument, whose in re.findall(r"^\| `(x-[\w-]+)` \| ([^|]+) \|", section, re.MULTILINE):
        which, _, but = whose.partition("; ")[0].partition(" but ")
        for kind in KINDS if which.strip() == "all" else which.strip().split(", "):
            if kind not in but.strip().split(" and "):
                told[kind].add(argument)
    assert told == {kind: set(queue.queue_arguments or ()) for kind, queue in queues.items()}


def test_the_reference_has_every_setting() -> None:
    rows = re.findall(r"^\| `(rabbitdelay_\w+)` \| `(.+?)` \|", SETTINGS.read_text(), re.MULTILINE)
    defaults = {key.removeprefix("rabbitdelay_"): ast.literal_eval(value) for key, value in rows}
    groups = [Settings, *map(additions.load, dict.fromkeys(additions.settings.values()))]
    documented: set[str] = set()
    for group in groups:
        names = {setting.name for setting in fields(group)}
        assert group(**{name: defaults[name] for name in names}) == group()
        documented |= names
    assert defaults.keys() == documented
    roles = SETTINGS.read_text().partition("## Settings by role")[2].partition("\n## ")[0]
    assert set(re.findall(r"`rabbitdelay_(\w+)`", roles)) == documented


def test_the_page_of_the_api_has_every_public_name() -> None:
    page = API.read_text()
    directive = r"auto(?:class|function|exception):: {}\.([A-Za-z_]+)$"
    others = celery_rabbitdelay.kombu, celery_rabbitdelay.additions, celery_rabbitdelay.testing
    for module in (celery_rabbitdelay, *others):
        public = set(module.__all__) - set(celery_rabbitdelay.exceptions.__all__) - {"__version__"}
        modules = {name for name in public if inspect.ismodule(getattr(module, name))}
        for name in modules:
            assert f".. automodule:: {getattr(module, name).__name__}\n" in page
        told = re.findall(directive.format(re.escape(module.__name__)), page, re.MULTILINE)
        assert set(told) == public - modules


def test_the_page_of_the_api_has_every_error_with_its_docstring() -> None:
    # Sphinx takes the classes of the module that have a docstring, in the section on exceptions.
    section = API.read_text().partition("\n## Exceptions\n")[2]
    [options] = re.findall(r"automodule:: celery_rabbitdelay\.exceptions\n((?: +:.+\n)+)", section)
    assert ":members:\n" in options
    assert ":exclude-members:" not in options
    module = ast.parse(inspect.getsource(celery_rabbitdelay.exceptions))
    documented = {
        node.name
        for node in module.body
        if isinstance(node, ast.ClassDef)
        if ast.get_docstring(node)
    }
    assert errors().keys() <= documented


def errors() -> dict[str, type[RabbitDelayError]]:
    return {
        name: each
        for name, each in vars(celery_rabbitdelay.exceptions).items()
        if inspect.isclass(each) and issubclass(each, RabbitDelayError)
    }


def test_the_page_that_an_error_names_says_what_to_do() -> None:
    lost = {
        name: error.page
        for name, error in errors().items()
        if error is not RabbitDelayError
        if f"`{name}`" not in (DOCS / f"{error.page}.md").read_text()
    }
    assert lost == {}


def commands_of(group: click.Group) -> Iterator[str]:
    """Yield the names of commands and, behind a command's name, of its subcommands or actions."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield name
        if isinstance(command, click.Group):
            yield from (f"{name} {each}" for each in commands_of(command))
        for parameter in command.params:
            if isinstance(parameter, click.Argument) and isinstance(parameter.type, click.Choice):
                yield from (f"{name} {each}" for each in parameter.type.choices)


def test_the_page_of_the_command_line_has_every_command() -> None:
    page = (DOCS / "reference" / "command_line.md").read_text()
    sections = {
        name: text
        for title, text in re.findall(r"^## (.+)\n((?:(?!## ).*\n)*)", page, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", title)
    }
    commands = list(commands_of(rabbitdelay))
    assert {each for each in commands if " " not in each} == sections.keys()
    for name, subcommand in (each.split() for each in commands if " " in each):
        called = rf"`{subcommand}`|rabbitdelay {name} {subcommand}\b"
        assert re.search(called, sections[name]), f"{name} {subcommand}"


def test_the_page_of_the_headers_has_every_header() -> None:
    page = (DOCS / "reference" / "headers.md").read_text()
    texts = [each for each in vars(headers).values() if isinstance(each, str)]
    own = {each for each in texts if each.startswith(headers.OWN_PREFIX)} - {headers.OWN_PREFIX}
    described = page.partition("\n## Reserved names\n")[0]
    assert {each for each in own if f"`{each}`" not in described} == set()
    patterns = re.findall(r"`([\w*-]+)`", page)
    others = {*headers.BROKER_HEADERS, *headers.SENDER_SELECTED, headers.X_DELAY}
    assert {
        each for each in others if not any(fnmatchcase(each, pattern) for pattern in patterns)
    } == set()


def test_the_documentation_stays_short() -> None:
    pages = [ROOT / "README.md", *DOCS.rglob("*.md")]
    assert len(pages) <= 50
    assert sum(len(page.read_text().split()) for page in pages) <= 48_000


def test_each_link_of_the_pages_on_top_leads_to_a_file() -> None:
    for page in ("README.md", "CONTRIBUTING.md"):
        text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
        targets = re.findall(r"\]\(([^)#\s]+)", text)
        assert targets, page
        for target in targets:
            if not target.startswith("https://"):
                assert (ROOT / target).exists(), f"{page} links to {target}"


def test_contributing_names_targets_of_make() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):.*#[#:]", makefile, re.MULTILINE))
    # For a phony target, make tries no rule with a pattern: it would do nothing.
    assert set(makefile.partition(".PHONY:")[2].partition("\n\n")[0].split()) - {"\\"} <= targets
    rows = re.findall(r"^\| (`make .*?) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    named = {each for row in rows for each in re.findall(r"`(?:make )?([a-z-]+)", row)}
    assert len(named) > 10
    rooms = {f"test-{folder.parent.name}" for folder in ROOT.glob("tests/*/unit")}
    assert named <= targets | rooms


def test_contributing_names_files_that_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    files = re.findall(r"`([\w/]+\.(?:py|lua))`", text.partition("## Which tests")[0])
    assert len(files) > 10
    for file in files:
        folder = ROOT if file.startswith("tests/") else ROOT / "celery_rabbitdelay"
        assert (folder / file).is_file(), file
    for pattern in re.findall(r"`(tests/[\w/*]+\.py)`", text):
        assert "_name" in pattern or list(ROOT.glob(pattern)), pattern


def test_the_containers_of_the_documentation_ask_for_what_a_worker_serves() -> None:
    compose, deployment = (
        yaml.safe_load((DOCS / "deployment" / f"{name}.yaml").read_text())
        for name in ("compose", "kubernetes")
    )
    worker = compose["services"]["worker"]
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    [given] = {
        option.partition("=")[2]
        for option in (*worker["command"].split(), *container["command"])
        if option.startswith("--rabbitdelay-metrics-port")
    }
    port = f"{MetricsSettings(metrics_port=given).metrics_port}".partition(":")[2]
    *_, probe = worker["healthcheck"]["test"]
    compile(probe, "probe", "exec")
    assert f"http://127.0.0.1:{port}/readyz" in probe
    assert container["ports"] == [{"name": "metrics", "containerPort": int(port)}]
    asked = {name: each["httpGet"] for name, each in container.items() if name.endswith("Probe")}
    paths = {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}
    assert {name: each["path"] for name, each in asked.items()} == paths


def test_the_page_has_every_metric_with_its_kind_labels_and_meaning() -> None:
    rows = re.findall(r"^\| `(celery_rabbitdelay_\w+)` \| (.+?) \| (.*?) \| (.+?) \|$",
                      (DOCS / "how-to" / "metrics.md").read_text(), re.MULTILINE)  # fmt: skip
    assert rows == [
        (each.metric, each.kind, ", ".join(f"`{label}`" for label in each.labels), each.help)
        for each in INSTRUMENTS
    ]


#: What differs from run to run in a line that a page quotes; or is of other programs.
VALUES = re.compile(
    r"\.\.\.|'[^']*'|[\w-]*\d[\w.:,-]*|rabbitdelay\.[\w.]+"
    r"|permission \w+|ConnectionError: .*|.*(?:PRECONDITION|RESOURCE_LOCKED|celery |rabbitmqctl ).*"
)


def test_what_the_page_on_troubles_quotes_is_what_the_package_says() -> None:
    source = "\n".join(
        node.value
        for path in (ROOT / "celery_rabbitdelay").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    page = (DOCS / "how-to" / "troubleshooting.md").read_text()
    lines = "\n".join(re.findall(r"^```text\n(.*?)^```$", page, re.M | re.S)).splitlines()
    # Commands and what `show` prints are short.
    cells = re.findall(r"`([^`]*)`", "\n".join(re.findall(r"^\|.*$", page, re.M)))
    quoted = lines + [each for each in cells if len(each.split()) > 3]
    parts = [part for each in quoted for part in VALUES.split(each) if part.count(" ") > 3]
    assert len(parts) > 25
    for part in parts:
        # Parts of a line may stand in other texts, which are filled in.
        length = len(part) // 3
        assert any(part[at : at + length] in source for at in range(length + 1)), part
