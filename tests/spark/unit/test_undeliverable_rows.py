"""Undeliverable messages as rows of Arrow."""

from typing import Any

from hypothesis import given, settings

from celery_rabbitdelay.spark import data_source
from tests.operations.unit.test_undeliverable_messages import HALF, examined, tables


@given(tables)
@settings(max_examples=50)
def test_every_message_is_a_row(told: dict[str, Any]) -> None:
    (batch,) = data_source.batches([examined(told, b"x"), examined({"id": HALF})])
    columns = data_source.UNDELIVERABLE.split(", ")
    assert batch.schema.names == [column.split()[0] for column in columns]
    first, second = batch.to_pylist()
    assert (first["body"], first["size"], second["task_id"]) == (b"x", 1, "\\ud800")


def test_a_batch_has_few_rows_and_few_bytes() -> None:
    most = data_source.BATCH_ROWS
    small = data_source.batches([examined({})] * (2 * most + 1))
    assert [len(batch) for batch in small] == [most, most, 1]
    large = data_source.batches([examined({}, bytes(data_source.BATCH_BYTES // 2))] * 5)
    assert [len(batch) for batch in large] == [2, 2, 1]
