"""The version before this one, from the git history."""

import io
import subprocess
import tarfile
from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).resolve().parents[1]

#: The commit of the version before.
FORMER: Final = "ecbc7e6"


class FormerVersionMissing(LookupError):
    """The git history lacks the version, as in a shallow clone or an unpacked archive."""


def extract(into: Path, *paths: str, commit: str = FORMER) -> None:
    """Put files of a commit into a folder.

    Args:
        into: The folder; it is made.
        *paths: Files and folders of the repository; all of them if none is named.
        commit: The commit.

    Raises:
        FormerVersionMissing: The git history does not have it.
    """
    command = ["git", "-C", str(REPOSITORY), "archive", commit, *paths]
    try:
        archive = subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", b"").decode().strip() or str(error)
        raise FormerVersionMissing(
            f"commit {commit} is not in the git history here ({why}): fetch the whole history with "
            "`git fetch --unshallow`, or name a folder that has that version with --former"
        ) from error
    into.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(into, filter="data")
