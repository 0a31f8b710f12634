"""What doctests know (an op's example runs twice, on its reference and on the public op), and what a test leaves."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _torch_in_doctests(doctest_namespace):
    doctest_namespace["torch"] = torch


@pytest.fixture(autouse=True)
def _memory_goes_back_to_the_gpu():
    """A test of rows gigabytes apart frees its memory for the other processes; torch would keep it in its cache."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()
