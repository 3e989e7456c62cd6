"""The notes of the chaos scenarios: what processes write, also killed ones, makes a ledger."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.ledger import Sent, Start
from tests.chaos.notes import Notes, NotesReader

SENT = Sent("a", "sound", ("work",), 6000.0, 1000.0)
START = Start("a", "work", 6001.0)


def test_a_send_is_confirmed_only_once_its_end_is_noted(tmp_path: Path) -> None:
    notes, reader = Notes(str(tmp_path)), NotesReader(tmp_path)
    notes.begin(SENT)
    assert reader.ledger().sent["a"].outcome == "unknown"
    assert reader.unfinished() == 0
    notes.end("a", "confirmed", attempts=2)
    assert reader.ledger().sent["a"].outcome == "confirmed"
    assert reader.ledger().sent["a"].attempts == 2
    assert reader.unfinished() == 1


def test_a_start_finishes_a_task_once_it_is_at_each_place(tmp_path: Path) -> None:
    notes, reader = Notes(str(tmp_path)), NotesReader(tmp_path)
    notes.begin(Sent("a", "sound", ("work", "mirror"), 6000.0, 1000.0))
    notes.end("a", "confirmed")
    notes.start(START)
    assert reader.unfinished() == 1
    notes.start(Start("a", "mirror", 6002.0))
    assert reader.unfinished() == 0


def test_a_line_that_is_half_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    notes, reader = Notes(str(tmp_path)), NotesReader(tmp_path)
    notes.begin(SENT)
    notes.end("a", "confirmed")
    notes.start(START)
    (file,) = tmp_path.glob("*.notes")
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    assert reader.unfinished() == 1
    file.write_bytes(whole)
    assert reader.unfinished() == 0
    assert reader.ledger().starts["a", "work"] == [START]
