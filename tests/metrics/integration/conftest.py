"""The fixtures of the rooms below."""

from tests.registry.integration.conftest import *  # noqa: F403 - its fixtures
