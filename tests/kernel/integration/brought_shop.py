"""An application with classes of its own for all that Celery lets one replace.

With the setting ``installs`` it is made with :func:`celery_rabbitdelay.install`, otherwise it is
one of plain Celery. A worker is started with ``-A tests.kernel.integration.brought_shop`` and gets
its configuration as JSON in the environment variable ``BROUGHT``. Its overrides take less than
Celery's methods, as many do.
"""

# mypy: disable-error-code="override, type-arg"

import json
import os
from typing import Any

import celery
from celery.app.amqp import AMQP
from celery.app.control import Control
from celery.result import AsyncResult
from kombu.utils.objects import cached_property

from celery_rabbitdelay import install
from tests.kernel.integration.worker import Worker


class TenantAMQP(AMQP):
    """Queues of a tenant."""


class TenantControl(Control):
    """The remote control of a tenant."""


class TenantResult(AsyncResult):
    """The result of a tenant's task."""


class TenantTask(celery.Task):
    """The base class of a tenant's tasks."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return ["tenant", *super().__call__(*args, **kwargs)]

    def apply_async(self, args: Any = (), kwargs: Any = None, **options: Any) -> Any:
        args = [*args]
        headers = {"x-applied": "tenant", **(options.pop("headers", None) or {})}
        return super().apply_async(args, kwargs, headers=headers, **options)


class TenantCelery(celery.Celery):
    """An application of a tenant; no method calls one of this package's."""

    def on_init(self) -> None:
        """Do nothing, as Celery's does."""

    def create_task_cls(self) -> Any:
        """Create the base class of tasks."""
        return self.subclass_with_self(
            TenantTask, name="Task", attribute="_app", keep_reduce=True, abstract=True
        )

    def send_task(self, name: str, args: Any = (), kwargs: Any = None, **options: Any) -> Any:
        """Send a task with the header of the tenant, some over the tenant's own connections."""
        if not name.startswith("early"):
            options.pop("producer", None)
        assert args is not None or "task_type" in options
        headers = {**(options.pop("headers", None) or {}), "x-tenant": "acme"}
        return super().send_task(name, args, kwargs, headers=headers, **options)

    @cached_property
    def amqp(self) -> Any:
        """The queues."""
        made = TenantAMQP(app=self)
        assert made.queues is not None
        return made

    @cached_property
    def control(self) -> Any:
        """The remote control."""
        return TenantControl(app=self)

    @cached_property
    def AsyncResult(self) -> Any:  # noqa: N802
        """The class of results."""
        return self.subclass_with_self(TenantResult, name="AsyncResult", reverse="AsyncResult")


class Audited(celery.Task):
    """A base class that knows nothing of any application."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return ["audited", *super().__call__(*args, **kwargs)]

    def retry(self, countdown: float = 5.5, **options: Any) -> Any:
        """Retry with a default of its own."""
        return super().retry(countdown=countdown, **options)


class Classy(celery.Task):
    """A task that is a class, with a state and slots."""

    __slots__ = ("_word",)
    name = "registered"

    def __init__(self, word: str) -> None:
        self._word = word

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return [self._word, *super().__call__(*args, **kwargs)]

    def run(self, options: Any = None) -> Any:
        """Retry once."""
        return run(self, options)


def run(self: Any, options: Any = None) -> Any:
    """Retry once, and tell what the task has seen and is."""
    if not self.request.retries and options:
        raise self.retry(**options)
    bases = {each.__name__ for each in type(self).__mro__}
    return [
        sorted(bases & {"TenantTask", "Audited", "Classy", "ContextTask"}),
        self.request.retries,
        (self.request.headers or {}).get("x-tenant"),
        (self.request.headers or {}).get("x-applied"),
        self.__doc__,
        isinstance(self.app.amqp, TenantAMQP),
        isinstance(self.app.control, TenantControl),
        issubclass(self.app.AsyncResult, TenantResult),
    ]


@celery.shared_task(bind=True, name="shared", base=Audited)
def shared(self: Any, options: Any = None) -> Any:
    """Run as any other."""
    return run(self, options)


#: The tasks of the application.
TASKS = (
    *("early", "decorated", "context", "based"),
    *("registered", "shared"),
)


def make_app(configuration: dict[str, Any]) -> Any:
    """Create the application.

    Args:
        configuration: Celery's settings, and ``installs``.
    """
    settings = dict(configuration)
    installs = settings.pop("installs")
    app: Any = TenantCelery("brought", set_as_current=False)
    if not installs:
        settings = {name: each for name, each in settings.items() if "rabbitdelay" not in name}
    app.conf.update(worker_hijack_root_logger=False, **settings)
    app.task(run, bind=True, name="early", shared=False)
    assert app.tasks["early"].name
    if installs:
        install(app)
    app.task(run, bind=True, name="decorated", shared=False)

    class ContextTask(app.Task):  # type: ignore[misc]
        """As in Flask's recipe."""

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return ["context", *super().__call__(*args, **kwargs)]

    app.Task = ContextTask
    app.task(run, bind=True, name="context", shared=False)
    app.task(run, bind=True, name="based", shared=False, base=Audited)
    app.register_task(Classy("word"))
    return app


class BroughtWorker(Worker):
    """A worker of the application."""

    module = "tests.kernel.integration.brought_shop"
    variable = "BROUGHT"


if "BROUGHT" in os.environ:
    app = make_app(json.loads(os.environ["BROUGHT"]))
