"""What the producers of the chaos scenarios send, and what they note about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from celery_rabbitdelay import Report, Row, RowsNotConfirmed
from celery_rabbitdelay.exceptions import ConnectionBlocked, MessageNacked
from tests.chaos.application import TASK
from tests.chaos.notes import Notes, NotesReader
from tests.chaos.producing import Stream, send_rows

STREAM = Stream("sound", "work", 10, way="rows")


class Uncertain(ConnectionBlocked):
    """The broker may have the message."""

    may_have_arrived = True


class Refused(MessageNacked):
    """The broker does not have the message."""

    may_have_arrived = False


class Broker:
    """Stands for an application: each ``send_many`` takes some rows and fails on some.

    Args:
        rounds: What each call does: how many rows it takes (None: all), and the errors by row.
    """

    def __init__(self, *rounds: tuple[int | None, Mapping[int, Exception]]) -> None:
        self.tasks = {TASK: None}
        self.rabbitdelay = SimpleNamespace(send_many=self._send_many)
        self.sent: Counter[str] = Counter()
        self._rounds = list(rounds)

    def _send_many(self, task: Any, rows: Iterable[Row], **_: Any) -> None:
        takes, errors = self._rounds.pop(0) if self._rounds else (None, {})
        for number, row in enumerate(rows):
            if number == takes:
                raise RowsNotConfirmed(Report(), errors, number)
            assert row.task_id is not None
            self.sent[row.task_id] += 1
        if errors:
            raise RowsNotConfirmed(Report(), errors, None)


def sent_to(broker: Broker, folder: Path) -> tuple[Counter[str], Counter[str | None]]:
    """Send the stream; return how many sends there were by their outcome, and by their error."""
    send_rows(broker, STREAM, Notes(str(folder)))  # type: ignore[arg-type]
    sent = NotesReader(folder).ledger().sent.values()
    assert {each.id for each in sent if each.error != "NotTaken"} == set(broker.sent)
    return Counter(each.outcome for each in sent), Counter(each.error for each in sent)


def test_all_rows_are_sent_at_once_if_all_are_confirmed(tmp_path: Path) -> None:
    assert sent_to(Broker(), tmp_path) == ({"confirmed": 10}, {None: 10})


def test_rows_that_send_many_did_not_take_are_sent_by_another(tmp_path: Path) -> None:
    error = Uncertain("blocked", "", "")
    broker = Broker((4, {3: error}), (2, {0: error, 1: error}))
    outcomes, errors = sent_to(broker, tmp_path)
    assert outcomes["confirmed"] == 10
    assert errors == {None: 10, "Uncertain": 3, "NotTaken": 2}


def test_a_row_that_is_not_confirmed_is_replaced_and_its_id_is_not_sent_again(
    tmp_path: Path,
) -> None:
    errors = {0: Uncertain("blocked", "", ""), 9: Refused("", "", "")}
    broker = Broker((None, errors), (None, {1: Refused("", "", "")}))
    outcomes, named = sent_to(broker, tmp_path)
    assert outcomes == {"confirmed": 10, "raised": 3}
    assert named == {None: 10, "Uncertain": 1, "Refused": 2}
    assert set(broker.sent.values()) == {1}


def test_what_is_sent_again_keeps_the_pace_of_the_stream() -> None:
    assert Stream("sound", "work", 1000, 60.0).shortened(50) == Stream("sound", "work", 50, 3.0)
