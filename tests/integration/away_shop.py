"""An application whose broker is away, with a password that no error text may show."""

from __future__ import annotations

from typing import Final

from celery_rabbitdelay import Celery

PASSWORD: Final = "opensesame"

app = Celery("away", broker=f"amqp://guest:{PASSWORD}@127.0.0.1:1//", set_as_current=False)
app.conf.rabbitdelay_confirm_timeout = 1


@app.task(name="note", shared=False)
def note(*given: object) -> None:
    """Never runs."""
