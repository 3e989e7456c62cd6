"""Things that are set up step by step, and torn down in the reverse order."""

from abc import ABC, abstractmethod
from contextlib import ExitStack
from typing import Self


class SetUp(ABC):
    """A context manager that tears down what it has set up, even if a later step of that fails."""

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._set_up(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @abstractmethod
    def _set_up(self, stack: ExitStack) -> None:
        """Set everything up; ``stack`` gets what tears it down."""
