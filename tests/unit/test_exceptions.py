"""The errors: their texts, and that they survive the way to another process."""

from __future__ import annotations

import pickle
from dataclasses import fields
from typing import Any, Final

import pytest

import celery_rabbitdelay.exceptions as errors

#: A value for each type of an attribute.
SAMPLES: Final[dict[str, Any]] = {
    "Any": None,
    "bool": True,
    "Mapping[str, int]": {"one": 1, "two": 2},
    "float": 1.5,
    "float | None": 1.5,
    "int": 7,
    "int | None": 7,
    "Mapping[int, Exception]": {
        1: ValueError("wrong"),
        0: errors.ConnectionLost("x", "key", "cut"),
    },
    "MissingPermission": errors.MissingPermission("web", "write", "queue", "q", "/"),
    "object": {"braces": "{value}"},
    "str": "a {text}",
    "str | None": "a {text}",
    "tuple[str, ...]": tuple("abcdefg"),
}


@pytest.mark.parametrize(
    "name",
    sorted(set(errors.__all__) - {"RabbitDelayError", "RowsNotConfirmed", "TasksNotConfirmed"}),
)
def test_an_error_keeps_its_text_and_attributes_in_another_process(name: str) -> None:
    kind = getattr(errors, name)
    attributes = {each.name: SAMPLES[str(each.type)] for each in fields(kind) if each.init}
    error = kind(**attributes)
    assert error.args == tuple(attributes.values())
    assert str(error)
    error.may_have_arrived = True
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert (str(copy), repr(vars(copy))) == (str(error), repr(vars(error)))


def test_rows_that_are_not_confirmed_keep_their_errors_in_another_process() -> None:
    lost = errors.ConnectionLost("x", "key", "cut")
    nacked = errors.MessageNacked("x", "key", "full")
    lost.may_have_arrived = True
    copy = pickle.loads(pickle.dumps(errors.RowsNotConfirmed("report", {5: nacked, 3: lost}, 7)))
    assert str(copy.errors) == str({3: lost, 5: nacked})
    told = (copy.report, copy.uncertain, copy.rest, copy.may_have_arrived)
    assert told == ("report", (3,), 7, True)


def test_tasks_that_are_not_confirmed_keep_their_errors_in_another_process() -> None:
    lost = errors.ConnectionLost("x", "key", "cut")
    nacked = errors.MessageNacked("x", "key", "full")
    lost.may_have_arrived = True
    error = errors.TasksNotConfirmed({"a": nacked, "b": lost})
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert str(copy.errors) == str({"a": nacked, "b": lost})
    assert (copy.uncertain, copy.may_have_arrived) == (("b",), True)
    assert errors.TasksNotConfirmed({"a": nacked}).may_have_arrived is False
