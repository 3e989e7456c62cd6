"""A Spark stream as a producer of the soak: rows of files become tasks, each once.

A file is written every few seconds, and the stream reads it. If the stream fails, it is started
again, and so is the process if it is killed: the checkpoint says where it goes on.
"""

import json
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

from tests.chaos.application import Part
from tests.chaos.ledger import Notes, Sent, now_ms
from tests.spark.integration.spark import QUICK_JAVA, spark_session

#: Seconds between two files; and the delay of their rows.
EVERY, DELAY = 4.0, 20.0

#: Seconds after which a batch that was not committed is dropped.
EXPIRES: Final = 600

APP: Final = "tests.chaos.application:app"


@dataclass(frozen=True)
class Streamed:
    """What a Spark stream sends, until an instant.

    Attributes:
        until_ms: When the last file is written.
        tasks_a_second: How many rows a second.
    """

    until_ms: float
    tasks_a_second: float

    def send(self, _: Any, notes: Notes, part: Part) -> None:
        """Write files, and stream them, until Spark has committed all of them."""
        folder = Path(part.folder, "spark")
        files, written = folder / "files", folder / "written"
        for each in (files, written):
            each.mkdir(parents=True, exist_ok=True)
        with spark_session(QUICK_JAVA, master="local[1]") as spark:
            rows = spark.readStream.schema("id string").json(str(files))
            rows = rows.selectExpr("id task_id", "array() args", f"{DELAY}D delay")
            stream = rows.writeStream.format("rabbitdelay").options(task="note", app=APP)
            # If Redis forgets a commit, its copy restores it shortly before the job expires.
            stream = stream.option("jobExpires", EXPIRES)
            stream = stream.option("checkpointLocation", str(folder / "checkpoint"))
            query, is_over = stream.start(), False
            while not is_over:
                is_over = now_ms() > self.until_ms
                if not is_over:
                    self._write(notes, files, written)
                    time.sleep(EVERY)
                with suppress(Exception):  # a failed query says so again
                    if is_over:
                        query.processAllAvailable()
                if query.exception() is not None:
                    query, is_over = stream.start(), False
        for path in files.glob("*.json"):
            for line in path.read_text().splitlines():
                notes.end(json.loads(line)["id"])

    def _write(self, notes: Notes, files: Path, written: Path) -> None:
        """Write a file of rows that become tasks."""
        at_ms, ids = now_ms(), [f"{uuid4()}" for _ in range(int(EVERY * self.tasks_a_second))]
        for each in ids:
            notes.begin(Sent(each, "Spark", at_ms + DELAY * 1000, at_ms, once=True))
        path = written / f"{uuid4()}.json"
        path.write_text("".join(f'{{"id": "{each}"}}\n' for each in ids))
        path.rename(files / path.name)
