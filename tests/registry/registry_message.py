"""A message of a task in the registry, as the tests of its rule play with it."""

from __future__ import annotations

from typing import NamedTuple

from celery_rabbitdelay.levels.headers import Mark
from celery_rabbitdelay.registry.decision import Arrival, Registration, Ticket


class Message(NamedTuple):
    """A message of a task that waits or has arrived.

    Attributes:
        copy: Its name; empty if the task is neither tracked nor has a key.
        life: How often the task had been sent anew when this message was sent; -1 for not known.
        attempt: Which retry or replacement.
        due: When it is due.
        order: Its order under the key; 0 without a key.
        once: Whether one message of the attempt runs, and that one once.
        name: With ``once``: what it has in common with its copies, and with what they are put back
            as.
        generation: How often it was put back.
        former: The arrivals that have put it back.
        redelivered: Whether RabbitMQ has delivered it before.
        in_doubt: Whether it was put back although RabbitMQ had redelivered it.
        in_job: Whether it belongs to the job.
        is_old: Whether it was due, and put back last, so long ago that decisions about it may be
            forgotten.
    """

    copy: str
    life: int = 0
    attempt: str = "0.0"
    due: int = 0
    order: int = 0
    once: bool = False
    name: str = ""
    generation: int = 0
    former: tuple[str, ...] = ()
    redelivered: bool = False
    in_doubt: bool = False
    in_job: bool = False
    is_old: bool = False

    @property
    def full(self) -> tuple[str, str]:
        """The attempt, with the life that it belongs to."""
        return (f"?{self.copy}" if self.life < 0 else str(self.life)), self.attempt

    def put_back(self, arrival: str) -> Message:
        """Return what an arrival of it puts back."""
        return self._replace(
            generation=self.generation + 1,
            former=(*self.former, arrival),
            in_doubt=self.in_doubt or self.redelivered,
            redelivered=False,
        )

    def arrival(self, name: str = "", is_paused: bool = False) -> Arrival:
        """Return an arrival of it, as the rule takes it.

        Args:
            name: With ``once``: the name of the arrival.
            is_paused: Whether the task's name, or the queue, is paused.
        """
        return Arrival(
            "task",
            self.due,
            self.attempt,
            self.copy,
            Ticket(self.life, self.order),
            job="job" if self.in_job else "",
            once="queue" if self.once else "",
            mark=Mark(self.name, self.generation, self.former),
            name=name,
            redelivered=self.redelivered,
            in_doubt=self.in_doubt,
            paused_ms=int(is_paused),
        )

    @property
    def registration(self) -> Registration:
        """It after it was sent, as the rule takes it."""
        ticket = Ticket(self.life, self.order)
        return Registration("task", self.copy, self.due, self.attempt, ticket)
