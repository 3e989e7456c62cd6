"""A streaming query over files is killed in the middle of its batches: each row runs once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from celery_rabbitdelay.testing import RedisServer, wait_for
from tests.integration.conftest import small_configuration
from tests.integration.notes import Notes
from tests.integration.shop import PATIENCE, make_app
from tests.integration.spark_killing import STARTED, kill_when, start
from tests.integration.spark_pausing import PAUSED, PAUSES_IN
from tests.integration.worker import Worker

#: How often the query is killed, each time in the next batch; one more batch is written in peace.
KILLS = 3

#: Rows of a file.
ROWS = 20


@pytest.fixture(scope="module")
def registry() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def settings(module_broker_url: str, redis_url: str, registry: RedisServer) -> dict[str, Any]:
    return {
        **small_configuration(module_broker_url, redis_url, f"test-{uuid4().hex[:8]}"),
        "rabbitdelay_registry_url": registry.url,
    }


@pytest.fixture
def shop(settings: dict[str, Any]) -> Iterator[Any]:
    app = make_app(settings)
    with Worker(settings):
        yield app
    app.close()


@pytest.mark.timeout(1500)
def test_a_query_that_is_killed_in_three_batches_sends_each_row_once(
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
    wait_for(lambda: len(set(noted())) >= number, "all tasks", PATIENCE)
    shop.tasks["note"].apply_async((-1,), {"key": noted.key}, delay=2)
    wait_for(lambda: -1 in noted(), "a later task", PATIENCE)
    assert sorted(noted()) == [-1, *range(number)]
