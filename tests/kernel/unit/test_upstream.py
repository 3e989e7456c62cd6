"""The private parts of Celery and kombu that the ``*_internals`` use are where they look for them.

Only what fails in silence, or in rare cases, is here: what every send, worker and canvas of the
integration tests needs is not repeated.
"""

import inspect
from datetime import UTC, datetime, timedelta, timezone
from random import randbytes
from typing import Any

import celery
import pytest
from celery.app.task import Task
from kombu import Connection, compression

from celery_rabbitdelay.app import celery_internals as of_app
from celery_rabbitdelay.publishing import kombu_internals as internals


def test_a_retry_rejects_what_it_cannot_send() -> None:
    assert "raise Reject(exc, requeue=False)" in inspect.getsource(Task.retry)


def test_a_task_is_found_without_finalizing_the_application() -> None:
    app: Any = celery.Celery("shop", broker="memory://", set_as_current=False)

    @app.task(name="remind", shared=False)
    def remind() -> None: ...

    assert of_app.registered_task(app, "unknown") is None
    assert not app.finalized
    app.finalize()
    assert of_app.registered_task(app, "remind") is not None


def test_an_eta_is_read_as_celery_reads_it() -> None:
    instant, tokyo = datetime(2030, 1, 2, tzinfo=UTC), timezone(timedelta(hours=9))
    for value in (instant, instant.isoformat(), "2030-01-02T00:00:00"):
        assert of_app.eta_of(value, tokyo) == instant
    wrong: list[Any] = [None, "tomorrow", 5]
    assert [of_app.eta_of(each, tokyo) for each in wrong] == [None] * 3


def test_only_kombu_s_own_json_is_known_as_such() -> None:
    found = [internals.is_kombus_json(name) for name in ("json", "pickle", "unknown")]
    assert found == [True, False, False]


@pytest.mark.parametrize("name", compression.encoders())
def test_all_that_kombu_decompresses_is_counted_up_to_a_bound(name: str) -> None:
    for body in (b"", b"x", randbytes(2**17) + bytes(2**20)):
        compressed, content_type = compression.compress(body, name)
        for most in (2**24, len(body), len(body) // 2):
            size = internals.decompressed_size(compressed, content_type, most)
            assert size == min(len(body), most + 1)


def test_a_compression_of_the_application_itself_is_left_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    private: Any = compression
    monkeypatch.setitem(private._decoders, "application/x-gzip", bytes)
    assert internals.decompressed_size(b"own", "gzip", 9) == 0


def test_a_new_connection_has_declared_nothing() -> None:
    with Connection("memory://") as connection:
        connection.connect()
        internals.declared_entities(connection).add("noted")
        assert "noted" in internals.declared_entities(connection)
        internals.drop_connection(connection)
        assert not connection.connected
        connection.connect()
        assert not internals.declared_entities(connection)
