"""What Celery's options for publishing say about resends."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import pytest
from celery.app import amqp as celery_amqp
from celery.app.defaults import DEFAULTS

from celery_rabbitdelay import Celery
from celery_rabbitdelay.app.sending.task_producer import publish_policy
from celery_rabbitdelay.exceptions import ConnectionLost
from celery_rabbitdelay.publishing.publication import BACKOFF

#: Celery's own policy: three retries.
CELERYS = DEFAULTS["task_publish_retry_policy"]


def app_with(**settings: Any) -> Celery:
    app = Celery("shop", set_as_current=False)
    app.conf.update(settings)
    return app


#: The default, of which connecting takes as many retries as Celery's.
DEFAULT = (None, 3)


@pytest.mark.parametrize(
    ("setting", "option", "resends", "reconnects"),
    [
        ({}, {}, *DEFAULT),
        ({}, {"interval_max": 5}, *DEFAULT),
        ({}, {"max_retries": 3}, 3, None),
        ({}, {"max_retries": 0}, 0, None),
        (dict(CELERYS), {}, *DEFAULT),
        ({**CELERYS, "max_retries": 7}, {}, 7, None),
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
    ("settings", "options"),
    [({"task_publish_retry": False}, {}), ({}, {"retry": False}), ({}, {})],
    ids=["setting off", "option off", "Celery says so"],
)
def test_without_retry_a_message_is_sent_once(settings: Any, options: Any) -> None:
    assert publish_policy(app_with(**settings), options, False, CELERYS).resends == 0


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
        ({}, BACKOFF),
        ({"interval_start": None}, BACKOFF),
        ({"interval_start": 1, "interval_step": 2, "interval_max": 5}, (1.0, 2.0, 5.0)),
        ({"interval_max": 0}, (0.0, 0.2, 0.0)),
    ],
)
def test_other_intervals_are_those_of_this_package(policy: Any, backoff: Any) -> None:
    assert publish_policy(app_with(), {}, True, policy).backoff == backoff


@pytest.mark.parametrize(
    ("settings", "options", "attempts"),
    [
        ({"task_publish_retry": False}, {}, 1),
        ({"task_publish_retry": False}, {"retry": True, "retry_policy": {"max_retries": 2}}, 3),
        ({"task_publish_retry_policy": {"max_retries": 4, "interval_step": 0}}, {}, 5),
        ({}, {}, 4),
    ],
)
def test_a_broker_that_refuses_connections_is_an_error_after_so_many_attempts(
    settings: Any, options: Any, attempts: int
) -> None:
    app: Any = app_with(broker_url="amqp://guest:guest@127.0.0.1:1//", **settings)
    with pytest.raises(ConnectionLost, match=f"attempt {attempts}: ") as caught:
        app.send_task("look", delay=5, **options)
    assert not caught.value.may_have_arrived
