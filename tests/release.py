# ruff: noqa: T201  # a program at the terminal prints
"""Check what a release would publish: build it, install it from the file, and test it there.

``python -m tests.release`` makes everything under ``build/release``, its tools included, and prints
a table. ``--python 3.12`` takes one version of Python instead of all, ``--only extra`` one kind of
check; both may be repeated. A Python is looked up in the search path and in pyenv's folder; 3.14 is
Debian sid's, in a system that ``debootstrap`` makes once (only root may do that).
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Final

from tests.brokers import BROKERS, system_with
from tests.project_copy import REPOSITORY
from tests.whole.public_surface import documented

FOLDER: Final = REPOSITORY / "build" / "release"
PACKAGE: Final = "celery_rabbitdelay"
TOOLS: Final = ("check-jsonschema", "cyclonedx-bom", "pip-licenses", "pyright[nodejs]", "uv")
BIN: Final = FOLDER / "tools" / "bin"

#: The last one may come from Debian.
PYTHONS: Final = ("3.11", "3.12", "3.13", "3.14")
FROM_DEBIAN: Final = PYTHONS[-1]

#: The demonstration runs on this one: the newest that Spark supports.
DEMO: Final = "3.13"

KERNEL: Final = ("levels", "publishing", "modules", "app", "worker", "command")

#: The extras, each with the room that it is for.
EXTRAS: Final = ("metrics", "registry", "spark", "web")

#: What unit tests need beside the package: all of the extra ``test`` allows no lowest versions.
TESTED_WITH: Final = (
    *("arrow", "django-celery-beat", "fastapi", "freezegun", "httpx", "hypothesis", "jsonschema"),
    *("pendulum", "pytest-timeout", "pytest-xdist", "python-hcl2", "PyYAML", "trustme"),
)

#: Imports every module of the named rooms, and what functions of these modules import.
IMPORTS: Final = """
import ast, importlib, inspect, pkgutil, sys
for room in sys.argv[1:]:
    package = importlib.import_module(f"celery_rabbitdelay.{room}")
    assert "site-packages" in package.__file__, package.__file__
    for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        source = inspect.getsource(importlib.import_module(each.name))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom):
                importlib.import_module(node.module)
            elif isinstance(node, ast.Import):
                [importlib.import_module(each.name) for each in node.names]
"""

#: Kinds of configuration files by the schemas that check-jsonschema brings.
SCHEMAS: Final = {
    "github-workflows": ".github/workflows/*.yml",
    "github-issue-forms": ".github/ISSUE_TEMPLATE/bug.yml",
    "github-issue-config": ".github/ISSUE_TEMPLATE/config.yml",
    "readthedocs": ".readthedocs.yaml",
}

#: Licenses that would bind those who use the package beside its own.
_COPYLEFT: Final = re.compile(r"UNKNOWN|(?<!L)GPL|General Public License", re.IGNORECASE)


class Failed(Exception):
    """A check has failed; the message says how."""


def call(*command: str | Path, cwd: Path = FOLDER, codes: Sequence[int] = (0,)) -> str:
    """Run a command; return what it prints.

    Args:
        *command: The command.
        cwd: Its folder.
        codes: The exit codes without an error.

    Raises:
        Failed: It ended with an error.
    """
    own = {"SOURCE_DATE_EPOCH": "1700000000", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": ""}
    own["UV_PYTHON_DOWNLOADS"] = "never"
    run = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode not in codes:
        raise Failed(f"{' '.join(map(str, command))}\n{(run.stdout + run.stderr)[-3000:]}")
    return run.stdout


#: Runs a command in a Debian system, which sees the repository at the same place.
ENTER: Final = """
root=$1; mount -t proc proc "$root/proc"; mount --rbind /dev "$root/dev"; mkdir -p "$root$2"
for each in /etc/ssl "$2"; do mount --bind "$each" "$root$each"; done
shift 2; exec chroot "$root" env -C "$PWD" "$@"
"""


@cache
def entering(version: str) -> tuple[str, ...]:
    """Return the words before a command that is to see a version of Python."""
    if version != FROM_DEBIAN or shutil.which(f"python{version}"):
        return ()
    root = system_with(BROKERS[-1])
    if not (root / "usr" / "bin" / f"python{version}").exists():
        old = "-o Acquire::Check-Valid-Until=false"  # a mirror may lag behind by weeks
        for step in (f"{old} update", f"install -y --no-install-recommends python{version}-venv"):
            call("chroot", root, "apt-get", *step.split())
    return ("unshare", "--mount", "sh", "-ec", ENTER, "sh", str(root), str(REPOSITORY))


def python_of(version: str) -> Path:
    """Return the program of a version of Python."""
    if entering(version):
        return Path("/usr/bin", f"python{version}")
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    found = [*pyenv.glob(f"{version}.*/bin/python"), shutil.which(f"python{version}")]
    if found[0] is None:
        raise Failed(f"there is no Python {version}")
    return Path(found[0])


def environment(name: str, version: str, *wanted: str) -> Path:
    """Make a virtual environment with packages; return its Python."""
    folder = FOLDER / name
    call(BIN / "uv", "venv", "--quiet", "--clear", "--python", python_of(version), folder)
    call(BIN / "uv", "pip", "install", "--python", folder, *wanted)
    return folder / "bin" / "python"


def wheel(extra: str = "") -> str:
    """Return the wheel as a requirement, with an extra or several."""
    (path,) = (FOLDER / "first").glob("*.whl")
    return f"{path}[{extra}]" if extra else str(path)


@cache
def runtime() -> Path:
    """Return the Python of an environment with all that a user can install."""
    return environment("runtime", PYTHONS[0], wheel(",".join(EXTRAS)))


@cache
def tests_folder() -> Path:
    """Return a folder with all that the source distribution has beside the package itself."""
    folder = FOLDER / "tests"
    shutil.rmtree(folder, ignore_errors=True)
    package = shutil.ignore_patterns("celery_rabbitdelay", "pyspark_rabbitdelay")
    shutil.copytree(FOLDER / "source", folder, ignore=package)
    return folder


def unit_tests(python: Sequence[str | Path], *rooms: str) -> str:
    """Run the unit tests of rooms against the installed package; return pytest's last line."""
    folders = [f"tests/{room}/unit" for room in rooms]
    printed = call(*python, "-m", "pytest", "-q", "--numprocesses=2", *folders, cwd=tests_folder())
    return printed.splitlines()[-1].strip("= ")


def build() -> str:
    """Build from the tree, and once more from the source distribution, elsewhere."""
    for name in ("first", "source", "second"):
        shutil.rmtree(FOLDER / name, ignore_errors=True)
    call(BIN / "uv", "build", "--out-dir", FOLDER / "first", REPOSITORY)
    (packed,) = (FOLDER / "first").glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        archive.extractall(FOLDER, filter="data")
    (FOLDER / packed.name.removesuffix(".tar.gz")).rename(FOLDER / "source")
    (FOLDER / "source" / "PKG-INFO").unlink()  # would be there twice
    call(BIN / "uv", "build", "--out-dir", FOLDER / "second", FOLDER / "source")
    first, second = (
        {
            each.name: hashlib.sha256(each.read_bytes()).hexdigest()
            for each in (FOLDER / name).iterdir()
            if each.suffix in (".gz", ".whl")
        }
        for name in ("first", "second")
    )
    if first != second:
        raise Failed(f"another build has other bytes: {first}, {second}")
    return ", ".join(f"{name} {digest[:12]}" for name, digest in sorted(first.items()))


def _tracked(*folders: str) -> set[str]:
    return set(call("git", "ls-files", *folders, cwd=REPOSITORY).split())


def _compared(path: str, names: set[str], expected: set[str]) -> str:
    if names != expected:
        raise Failed(f"lacks {sorted(expected - names)}, has besides {sorted(names - expected)}")
    return f"{len(names)} files, {Path(path).stat().st_size / 1024:,.0f} KiB"


def wheel_contents() -> str:
    """Compare the wheel with the files of both packages."""
    with zipfile.ZipFile(wheel()) as archive:
        names = {each for each in archive.namelist() if ".dist-info/" not in each}
        size = sum(each.file_size for each in archive.infolist())
    found = _compared(wheel(), names, _tracked("celery_rabbitdelay", "pyspark_rabbitdelay"))
    return f"{found}, {size / 1024:,.0f} KiB unpacked"


def source_contents() -> str:
    """Compare the source distribution with the repository."""
    (packed,) = (FOLDER / "first").glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        names = {each.name.partition("/")[2] for each in archive if each.isfile()}
    return _compared(str(packed), names - {"PKG-INFO"}, _tracked())


def on_python(version: str) -> str:
    """Install the wheel with pip, alone; then what the tests need."""
    enter, folder = entering(version), FOLDER / version
    python = (*enter, str(folder / "bin" / "python"))
    call(*enter, python_of(version), "-m", "venv", "--clear", folder)
    call(*python, "-m", "pip", "install", "--quiet", wheel())
    call(*python, "-m", "pip", "check")
    call(*python, "-I", "-c", IMPORTS, *KERNEL)
    call(*enter, BIN / "uv", "pip", "install", "--python", folder, wheel("test"))
    exact = call(*python, "-c", "import platform; print(platform.python_version())").strip()
    return f"{exact}: {unit_tests(python, 'kernel')}"


def demo() -> str:
    """Run the demonstration in the environment of a Python that was tested."""
    printed = call(FOLDER / DEMO / "bin" / "python", "-m", "example_project", cwd=tests_folder())
    return f"{DEMO}: {printed.strip().splitlines()[-1]}"


def with_extra(extra: str) -> str:
    """Install one extra alone, and import the room that it is for."""
    python = environment(f"extra-{extra}", PYTHONS[0], wheel(extra))
    call(python, "-I", "-c", IMPORTS, extra)
    return f"{len(_installed(python))} packages"


def _installed(python: Path) -> dict[str, str]:
    listed = call(BIN / "uv", "pip", "list", "--format", "json", "--python", python)
    return {each["name"]: each["version"] for each in json.loads(listed)}


def _direct(python: Path) -> str:
    """Return the versions of the packages that pyproject.toml names."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = [each for name in EXTRAS for each in project["optional-dependencies"][name]]
    names = [re.split(r"[^\w-]", each)[0].lower() for each in project["dependencies"] + extras]
    installed = _installed(python)
    return ", ".join(f"{name} {installed[name]}" for name in names)


def lowest() -> str:
    """Test the lowest versions of all direct dependencies."""
    lowest = FOLDER / "lowest.txt"
    extras = [f"--extra={each}" for each in EXTRAS]
    least = ("--resolution=lowest-direct", f"--python-version={PYTHONS[0]}", "--quiet")
    project = REPOSITORY / "pyproject.toml"
    call(BIN / "uv", "pip", "compile", project, *extras, *least, "--output-file", lowest)
    wanted = (wheel(",".join(EXTRAS)), *TESTED_WITH, "--constraint", str(lowest))
    python = environment("lowest", PYTHONS[0], *wanted)
    rooms = ("kernel", "registry", "operations", "metrics", "schedules", "web")
    return f"{_direct(python)}: {unit_tests([python], *rooms)}"


def licenses() -> str:
    """Return the licenses of all packages that a user can install."""
    printed = call(BIN / "pip-licenses", "--python", runtime(), "--from=mixed", "--format=json")
    found: list[dict[str, Any]] = json.loads(printed)
    refused = [each for each in found if _COPYLEFT.search(each["License"])]
    if refused:
        raise Failed(f"not permissive: {refused}")
    return "; ".join(f"{each['Name']} {each['Version']} {each['License']}" for each in found)


def sbom() -> str:
    """Write the list of what a user can install, as CycloneDX."""
    file = FOLDER / "sbom.cdx.json"
    project = ("--pyproject", REPOSITORY / "pyproject.toml", "--mc-type", "library")
    reproducible = ("--output-reproducible", "--validate", "--output-file", file)
    call(BIN / "cyclonedx-py", "environment", runtime(), *project, *reproducible)
    return f"{len(json.loads(file.read_text())['components'])} components in {file.name}"


def types() -> str:
    """Ask pyright whether it knows the types of all public names, and of their members."""
    python = environment("types", PYTHONS[0], wheel(",".join(EXTRAS)), "celery-types")
    path = f"PATH={python.parent}:{os.environ['PATH']}"  # it has no other option for this
    verify = ("--verifytypes", PACKAGE, "--ignoreexternal", "--outputjson")
    printed = call("env", path, BIN / "pyright", *verify, codes=(0, 1))
    found = json.loads(printed)["typeCompleteness"]
    objects = (base for *_, each in documented() for base in getattr(each, "__mro__", [each]))
    names = {f"{each.__module__}.{each.__qualname__}." for each in objects}
    public = (*names, f"{PACKAGE}.exceptions.")
    symbols = [each for each in found["symbols"] if f"{each['name']}.".startswith(public)]
    if unknown := [
        each["name"] for each in symbols if each["isTypeAmbiguous"] or not each["isTypeKnown"]
    ]:
        raise Failed(f"unknown or ambiguous: {unknown}")
    return f"{len(symbols)} public names known; with private ones {found['completenessScore']:.1%}"


def configuration() -> str:
    """Check workflow files by the schemas of their services."""
    for schema, pattern in SCHEMAS.items():
        files = [*REPOSITORY.glob(pattern)]
        call(BIN / "check-jsonschema", "--builtin-schema", f"vendor.{schema}", *files)
    return ", ".join(SCHEMAS.values())


def checks(pythons: Sequence[str]) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield all checks, by their names."""
    yield "build", build
    yield "wheel", wheel_contents
    yield "source", source_contents
    yield from ((f"python {each}", partial(on_python, each)) for each in pythons)
    if DEMO in pythons:
        yield "demo", demo
    yield from ((f"extra {each}", partial(with_extra, each)) for each in EXTRAS)
    yield "highest", lambda: _direct(runtime())
    yield "lowest", lowest
    yield "licenses", licenses
    yield "sbom", sbom
    yield "types", types
    yield "configuration", configuration


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen checks; return 1 if one has failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.release", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--python", action="append", choices=PYTHONS, help="a version of Python")
    kinds = list(dict.fromkeys(name.split()[0] for name, _ in checks(PYTHONS)))
    parser.add_argument("--only", action="append", choices=kinds, help="a kind of check")
    given = parser.parse_args(arguments)
    if not (BIN / "uv").exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        call(sys.executable, "-m", "venv", FOLDER / "tools")
        call(BIN / "pip", "install", "--quiet", *TOOLS)
    has_failed = False
    for name, check in checks(given.python or PYTHONS):
        if name == "build" or name.split()[0] in (given.only or kinds):
            try:
                found = check()
            except (Failed, OSError) as error:
                has_failed, found = True, f"FAILED: {error}"
            print(f"{name:<16} {found}", flush=True)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
