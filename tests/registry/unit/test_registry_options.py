"""The options of the registry before anything is sent: what they need and take."""

from collections.abc import Callable
from typing import Any

import pytest
from celery import chain, group

from celery_rabbitdelay import exceptions
from tests.kernel.unit import test_app, test_copies
from tests.kernel.unit.test_copies import Sends, make_app, of_task, rows_are_copies

#: Fixtures of the kernel's tests.
app, remind, sends = test_app.app, test_app.remind, test_copies.sends

REGISTRY = "redis://127.0.0.1:1"


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize(
    ("option", "value"), [("key", "order:7"), ("job", "import"), ("once", True), ("track", True)]
)
def test_an_option_of_the_registry_needs_one_however_the_task_is_sent(
    app: Any, remind: Any, option: str, value: Any, eager: bool
) -> None:
    app.conf.task_always_eager = eager
    given = {option: value}
    senders: list[Callable[[], Any]] = [
        lambda: remind.apply_async(**given),
        lambda: remind.apply_async(countdown=5, **given),
        lambda: remind.s().set(**given).apply_async(),
        lambda: remind.retry(throw=False, **given),
    ]
    if not eager:
        # Celery applies the parts of an eager canvas without sending them.
        senders += [
            lambda: app.send_task("remind", **given),
            lambda: app.signature("remind", app=app).set(**given).apply_async(),
            lambda: remind.apply_async(link=remind.si().set(**given)),
            lambda: chain(remind.si(), remind.si().set(**given)).apply_async(),
        ]
        if option != "key":  # of one task: a group refuses it in any case
            senders.append(lambda: group(remind.si(), remind.si()).apply_async(**given))
    for send in senders:
        with pytest.raises(exceptions.RegistryRequired, match=f"{option} = {value!r} needs the"):
            send()


def test_a_wrong_value_of_an_option_is_refused_with_its_name_and_an_example(remind: Any) -> None:
    with pytest.raises(exceptions.UnknownOption, match=r"key = 7.*'key:7'"):
        remind.apply_async(delay=5, key=7)


@pytest.mark.parametrize("options", [{"once": True}, {"key": "k"}, {"track": True}, {"job": "j"}])
def test_a_send_with_an_option_goes_through_celery(sends: Sends, options: Any) -> None:
    made = make_app(rabbitdelay_registry_url=REGISTRY)
    assert not sends.from_template(made.tasks["look"].apply_async, delay=60, **options)
    assert not rows_are_copies(made, **options)


def test_a_task_that_runs_once_or_is_tracked_goes_through_celery(sends: Sends) -> None:
    once = make_app(rabbitdelay_registry_url=REGISTRY)
    of_task(once, once=True)
    tracked = make_app(rabbitdelay_registry_url=REGISTRY, rabbitdelay_track="all")
    for made in (once, tracked):
        for _ in range(2):
            assert not sends.from_template(made.tasks["look"].apply_async, delay=60)
            assert not rows_are_copies(made)
