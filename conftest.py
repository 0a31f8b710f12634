"""What doctests know (an op's example runs twice, on its reference and on the public op), and what a test leaves."""

import pytest
import torch

from mxspec.plans import PLANS


@pytest.fixture(autouse=True)
def _torch_in_doctests(doctest_namespace):
    doctest_namespace["torch"] = torch


@pytest.fixture(autouse=True)
def _no_launch_plans_of_other_tests():
    """A test may change a table of a kernel. A plan of another test would not follow."""
    PLANS.clear()


@pytest.fixture(autouse=True)
def _memory_goes_back_to_the_gpu():
    """A test of rows gigabytes apart frees its memory for the other processes; torch would keep it in its cache."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()
