"""What ``celery rabbitdelay send`` tells about lines that are not confirmed."""

from __future__ import annotations

import io

from kombu.exceptions import OperationalError

from celery_rabbitdelay.app.sending.rows import Report
from celery_rabbitdelay.command.send import Lines, _as_json, _trouble
from celery_rabbitdelay.exceptions import ConnectionLost, MessageNacked, RowsNotConfirmed


def test_the_lines_that_may_have_arrived_are_told_in_json_and_in_words() -> None:
    lost = ConnectionLost("x", "key", "gone")
    lost.may_have_arrived = True
    errors = {
        0: MessageNacked("x", "key", "full"),
        3: lost,
        4: ConnectionLost("x", "key", "gone"),
        # Of Celery's own publishing, which does not tell.
        6: OperationalError("gone"),
    }
    failed, lines = RowsNotConfirmed(Report(), errors, None), Lines(io.BytesIO())
    told = _as_json(Report(), failed, lines)
    assert told["may_have_arrived"] == [4, 7]
    assert set(told["not_confirmed"]) == {1, 4, 5, 7}
    words = list(_trouble(failed, lines))
    assert words[0].startswith("line 1 was not confirmed: ")
    assert words[1].startswith("line 4 was not confirmed, but may have arrived: ")
