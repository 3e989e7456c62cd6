"""The fixtures of the kernel's unit tests."""

from tests.kernel.unit.conftest import *  # noqa: F403 - its fixtures
