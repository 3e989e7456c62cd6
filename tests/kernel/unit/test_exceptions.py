"""The errors are the same in another process."""

import pickle
from dataclasses import fields
from typing import Any, Final

import pytest

import celery_rabbitdelay.exceptions as errors

LOST: Final = errors.ConnectionLost("x", "key", "cut")
LOST.may_have_arrived = True
NACKED: Final = errors.MessageNacked("x", "key", "full")

#: A value for each type of an attribute.
SAMPLES: Final[dict[str, Any]] = {
    "Any": None,
    "bool": True,
    "Mapping[str, int]": {"one": 1, "two": 2},
    "float": 1.5,
    "float | None": 1.5,
    "int": 7,
    "int | None": 7,
    "Mapping[int, Exception]": {1: ValueError("wrong"), 0: NACKED},
    "MissingPermission": errors.MissingPermission("web", "write", "queue", "q", "/"),
    "object": {"braces": "{value}"},
    "str": "a {text}",
    "str | None": "a {text}",
    "tuple[str, ...]": tuple("abcdefg"),
}


def sample(name: str) -> Exception:
    kind = getattr(errors, name)
    attributes = {each.name: SAMPLES[str(each.type)] for each in fields(kind) if each.init}
    error: Exception = kind(**attributes)
    assert error.args == tuple(attributes.values())
    error.may_have_arrived = True  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    "make",
    [
        *(
            lambda name=name: sample(name)
            for name in sorted(
                set(errors.__all__) - {"RabbitDelayError", "RowsNotConfirmed", "TasksNotConfirmed"}
            )
        ),
        lambda: errors.RowsNotConfirmed("report", {5: NACKED, 3: LOST}, 7),
        lambda: errors.TasksNotConfirmed({"a": NACKED, "b": LOST}),
    ],
)
def test_an_error_keeps_its_text_and_attributes_in_another_process(make: Any) -> None:
    error = make()
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy)
    assert (str(copy), repr(vars(copy))) == (str(error), repr(vars(error)))
    note = f"See {error.page} in the documentation of celery_rabbitdelay."
    assert copy.__notes__ == error.copy(may_have_arrived=False).__notes__ == [note]
    assert note not in str(error)


def test_an_error_of_several_says_which_may_have_arrived() -> None:
    assert errors.RowsNotConfirmed("report", {5: NACKED, 3: LOST}, 7).uncertain == (3,)
    assert errors.TasksNotConfirmed({"a": NACKED, "b": LOST}).uncertain == ("b",)
