"""Hypothesis profiles: `dev`, `ci` where CI is set, or the one named on the command line."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# No deadline and no health check on speed: two busy cores say nothing about the code.
_QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}

settings.register_profile("dev", max_examples=50, **_QUIET)
settings.register_profile("ci", max_examples=200, derandomize=True, **_QUIET)
settings.register_profile("nightly", max_examples=2000, **_QUIET)
settings.load_profile("ci" if os.environ.get("CI") else "dev")
