"""How long, and how often, publishing is tried; what Celery's options say about it."""

from contextvars import ContextVar
from typing import Any

import pytest
from celery.app import amqp as celery_amqp
from celery.app.defaults import DEFAULTS

from celery_rabbitdelay import Celery
from celery_rabbitdelay.app.task_sending import publish_policy
from celery_rabbitdelay.publishing.publish_loop import BACKOFF, MIN_PAUSE, PublishPolicy

#: Celery's own policy: three retries.
CELERYS = DEFAULTS["task_publish_retry_policy"]


def app_with(**settings: Any) -> Celery:
    app = Celery("shop", set_as_current=False)
    app.conf.update(settings)
    return app


@pytest.mark.parametrize(
    ("setting", "option", "resends", "reconnects"),
    [
        # By default, connecting takes as many retries as Celery's.
        ({}, {"interval_max": 5}, None, 3),
        ({}, {"max_retries": 0}, 0, None),
        (dict(CELERYS), {}, None, 3),
        ({**CELERYS, "interval_max": 0.2}, {}, 3, None),
        ({"interval_max": 0.2}, {}, None, None),
        ({"max_retries": 7}, {"max_retries": 1}, 1, None),
    ],
)
def test_retries_count_if_somebody_gave_them(
    monkeypatch: pytest.MonkeyPatch, setting: Any, option: Any, resends: Any, reconnects: Any
) -> None:
    app = app_with(**({"task_publish_retry_policy": setting} if setting else {}))
    merged = {**app.conf.task_publish_retry_policy, **option}
    options = {"retry_policy": option} if option else {}
    policy = publish_policy(app, options, True, merged)
    assert (policy.resends, policy.reconnects) == (resends, reconnects)
    monkeypatch.setattr(Celery, "current_worker_task", "a worker's task", raising=False)
    assert publish_policy(app, options, True, merged).reconnects is None


@pytest.mark.parametrize(
    ("options", "resends"),
    [({}, None), ({"retry": False}, 0), ({"retry_policy": {"max_retries": 3}}, 0)],
    ids=["default", "off", "counted by Celery"],
)
def test_so_has_a_callback(monkeypatch: pytest.MonkeyPatch, options: Any, resends: Any) -> None:
    # As Celery 5.7 does it; earlier versions publish a callback like any other task.
    sending = ContextVar("sending", default=True)
    monkeypatch.setattr(celery_amqp, "_callback_publish_retry", sending, raising=False)
    assert publish_policy(app_with(), options, False, CELERYS).resends == resends


@pytest.mark.parametrize(
    ("policy", "backoff"),
    [
        (CELERYS, BACKOFF),
        ({"interval_start": None}, BACKOFF),
        ({"interval_start": 1, "interval_step": 2, "interval_max": 5}, (1.0, 2.0, 5.0)),
    ],
)
def test_other_intervals_are_those_of_this_package(policy: Any, backoff: Any) -> None:
    assert publish_policy(app_with(), {}, True, policy).backoff == backoff


#: Each pause is partly random, so each is looked at so many times.
LOOKS = 200


def test_without_a_backoff_a_port_that_refuses_is_not_asked_without_a_pause() -> None:
    policy = PublishPolicy(backoff=(0.0, 0.0, 0.0))
    assert policy.pause(1) == 0.0
    assert min(policy.pause(attempt) for attempt in range(2, LOOKS)) == MIN_PAUSE


@pytest.mark.parametrize(("resends", "over"), [(None, []), (0, [1, 2, 10_000]), (2, [10_000])])
def test_resends_are_counted_if_a_number_is_given(resends: int | None, over: list[int]) -> None:
    policy = PublishPolicy(resends=resends)
    assert [attempt for attempt in (1, 2, 10_000) if policy.is_over(attempt)] == over
