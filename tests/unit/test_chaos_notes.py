"""The notes of the chaos scenarios: what processes write, also killed ones, makes a ledger."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.ledger import Notes, NotesReader, Sent, Start

SENT = Sent("a", "sound", 6000.0, 1000.0)
START = Start("a", "work", 6001.0)


def test_a_send_is_confirmed_only_once_its_end_is_noted(tmp_path: Path) -> None:
    notes, reader = Notes(str(tmp_path)), NotesReader(tmp_path)
    notes.begin(SENT)
    assert reader.ledger().sent["a"].outcome == "unknown"
    assert reader.unfinished() == 0
    notes.end("a")
    assert reader.ledger().sent["a"].outcome == "confirmed"
    assert reader.unfinished() == 1


def test_a_line_that_is_half_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    notes, reader = Notes(str(tmp_path)), NotesReader(tmp_path)
    notes.begin(SENT)
    notes.end("a")
    notes.start(START)
    (file,) = tmp_path.glob("*.notes")
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    assert reader.unfinished() == 1
    file.write_bytes(whole)
    assert reader.unfinished() == 0
    assert reader.ledger().starts["a"] == [START]
