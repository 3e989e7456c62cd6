"""The fixtures of the rooms below."""

from tests.spark.integration.conftest import *  # noqa: F403 - its fixtures
