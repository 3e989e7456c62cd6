"""What an application takes and refuses before it speaks to any broker."""

import pickle
from collections.abc import Callable
from datetime import date, timedelta
from typing import Any

import celery
import pytest
from kombu import Exchange, Queue

from celery_rabbitdelay import Celery, exceptions, install

#: A port that nothing listens on: what gets as far as the broker fails with another error.
NOWHERE = "amqp://guest:guest@127.0.0.1:1//"

NAN = float("nan")


@pytest.fixture
def app() -> Any:
    app: Any = Celery("shop", broker=NOWHERE, set_as_current=False)
    app.conf.update(task_publish_retry=False, rabbitdelay_modules=[])

    @app.task(name="remind", shared=False)
    def remind(*args: Any) -> None: ...

    return app


@pytest.fixture
def remind(app: Any) -> Any:
    return app.tasks["remind"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        *(({"delay": 5, "tolerance": each}, "tolerance") for each in (-1, "60", True, NAN)),
        *((given, "tolerance") for given in ({"countdown": 5, "tolerance": -1}, {"tolerance": -1})),
        *(({"countdown": each}, "delay") for each in (True, "5", NAN)),
        *(
            ({"eta": each}, r"^eta .*: takes a datetime or ISO 8601.*2030-01-31T09:00:00\+01:00\n")
            for each in ("tomorrow", date(2100, 1, 1))
        ),
        *(({"delay": 5, "confirm_timeout": each}, "confirm_timeout") for each in ("5", 0, NAN)),
        ({"delay": timedelta(days=4000)}, r"345,599,999\.900 s"),
        ({"delay": "5"}, r"'5'.*timedelta\(days=3\)"),
        ({"delay": 5, "countdown": 0}, "cannot be combined"),
        ({"delay": 5, "eta": "2030-01-01T00:00"}, "cannot be combined"),
    ],
    ids=str,
)
def test_a_wrong_option_is_refused_with_its_name_and_an_example(
    app: Any, remind: Any, options: dict[str, Any], told: str
) -> None:
    for send in (remind.apply_async, lambda **given: app.send_task("remind", **given)):
        with pytest.raises((ValueError, TypeError, exceptions.DelayTooLong), match=told):
            send(**options)


def test_a_delay_of_more_than_a_hundred_years_is_refused(app: Any, remind: Any) -> None:
    app.conf.rabbitdelay_modules = ["check-in", "distribution"]
    with pytest.raises(exceptions.InvalidDelay, match="exceeds the maximum of 3,153,600,000 s"):
        remind.apply_async(delay=timedelta(days=36_500, milliseconds=1))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"rabbitdelay_bogus": 1}, "no such setting; the settings are rabbitdelay_prefix, "),
        ({"rabbitdelay_takeover": "no"}, "takes True or False"),
        ({"task_protocol": 1}, "delayed tasks need Celery's message protocol 2"),
    ],
    ids=str,
)
def test_settings_are_read_once_and_wrong_ones_are_an_error_of_each_way_to_send(
    app: Any, remind: Any, wrong: dict[str, Any], told: str
) -> None:
    app.conf.rabbitdelay_prefix = "first"
    assert app.rabbitdelay.topology.prefix == "first"
    app.conf.rabbitdelay_prefix = "second"
    assert app.rabbitdelay.topology.prefix == "first"
    app.rabbitdelay.reset()
    assert app.rabbitdelay.topology.prefix == "second"
    app.conf.update(wrong)
    app.rabbitdelay.reset()
    senders: list[Callable[[], Any]] = [
        lambda: remind.apply_async(countdown=5),
        lambda: app.rabbitdelay.send_many(remind, [{}]),
    ]
    for send in senders:
        with pytest.raises(exceptions.InvalidSetting, match=told):
            send()


@pytest.mark.parametrize("retries", [0, 1])
def test_only_a_retry_goes_back_to_the_queue_that_its_headers_name(app: Any, retries: int) -> None:
    fanout = Exchange("all", type="fanout")
    app.conf.task_queues = [Queue("a", fanout), Queue("b", fanout)]
    headers = {"rabbitdelay-due": 1, "rabbitdelay-queue": "b"}
    expected = exceptions.ConnectionLost if retries else exceptions.NeedsDistribution
    with pytest.raises(expected):
        app.send_task("remind", delay=5, queue="a", headers=headers, retries=retries)


class Custom(celery.Celery):
    """A third party's application class."""


@pytest.mark.parametrize("base", [celery.Celery, Custom])
def test_install_makes_an_existing_application_ours(base: type[celery.Celery]) -> None:
    app = base("shop", broker=NOWHERE, set_as_current=False)
    app.conf.rabbitdelay_modules = ["distribution"]
    assert app.amqp.queues is not None

    @app.task(shared=False)
    def remind() -> None: ...

    assert install(app) is install(app) is app
    for each in (app, pickle.loads(pickle.dumps(app))):
        assert isinstance(each, base)
        assert isinstance(each, Celery)
    with pytest.raises(exceptions.DelayTooLong):
        app.tasks[remind.name].apply_async(countdown=1e9)
