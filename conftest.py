"""Fixtures of all tests: the names that doctests know, and what is cleaned up before and after a test.

As a doctest, an op's example runs twice: on its reference and on the public op.
"""

import pytest
import torch
from hypothesis import HealthCheck, settings

from mxspec.plans import PLANS

pytest_plugins = ["tests.turns", "pytester"]

# A machine may be busy, so no test fails because its examples took long.
settings.register_profile("mxspec", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("mxspec")


@pytest.fixture(autouse=True)
def _torch_in_doctests(doctest_namespace):
    doctest_namespace["torch"] = torch


@pytest.fixture(autouse=True)
def _no_launch_plans_of_other_tests():
    """A test may change a kernel's configurations. A launch plan of another test would keep the old ones."""
    PLANS.clear()


@pytest.fixture(autouse=True)
def _memory_goes_back_to_the_gpu():
    """Free the memory of a test with gigabytes of tensors for the other processes. torch would keep it in its cache."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()
