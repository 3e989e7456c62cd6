"""A streaming query over files is killed in the middle of a batch: each row runs once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.notes import Notes
from tests.integration.spark_fixtures import registry, settings, shop, without_registry
from tests.integration.spark_killing import STARTED, kill_when, start
from tests.integration.spark_pausing import PAUSED, PAUSES_IN

__all__ = ["registry", "settings", "shop", "without_registry"]

#: How often the query is killed, each time in the next batch; another batch is written in peace.
KILLS = 1

#: Rows of a file.
ROWS = 20


@pytest.mark.timeout(1500)
def test_a_query_that_is_killed_in_a_batch_sends_each_row_once(
    settings: dict[str, Any], shop: Any, noted: Notes, tmp_path: Path
) -> None:
    files, paused, log = tmp_path / "files", tmp_path / "paused", tmp_path / "program.log"
    files.mkdir()
    for batch in range(KILLS + 1):
        lines = [f'{{"id": {batch * ROWS + number}}}' for number in range(ROWS)]
        (files / f"{batch}.json").write_text("\n".join(lines))
    arguments = (noted.key, str(files), str(tmp_path / "checkpoint"), "1")
    for batch in range(KILLS + 1):
        query = start(
            "tests.integration.spark_stream",
            *arguments,
            settings=settings,
            folder=tmp_path,
            **{PAUSED: str(paused), PAUSES_IN: str(batch) if batch < KILLS else "none"},
        )
        if batch < KILLS:
            kill_when(query, paused.exists, f"half of batch {batch}", log)
            paused.unlink()
        else:
            assert query.wait(STARTED) == 0, log.read_text()[-3000:]
    number = ROWS * (KILLS + 1)
    noted.wait(number)
    assert sorted(noted.until(1)) == [*range(number)]
