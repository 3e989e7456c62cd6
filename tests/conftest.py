"""The profiles of Hypothesis, and the servers that tests run against."""

from importlib.util import find_spec

from hypothesis import HealthCheck, Phase, settings

if find_spec("celery_rabbitdelay.testing") is not None:  # see tests/without.py
    from tests.server_fixtures import *  # noqa: F403 - fixtures and hooks

# A busy machine is no error: how long an example takes says nothing.
settings.register_profile(
    "no-deadline", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
# For tests.mutation: one example that fails is enough, and each run tries the same ones.
settings.register_profile(
    "mutation",
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
)
settings.load_profile("no-deadline")
