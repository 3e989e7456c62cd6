"""What the acceptance tests call their things on the broker, which may be somebody's own."""

from __future__ import annotations

from typing import Final

#: The queue of the tests' tasks, and Celery's direct exchange to it.
QUEUE: Final = "rabbitdelay-acceptance"

#: The prefix of the tests' delay levels.
PREFIX: Final = "rabbitdelay-acceptance"
