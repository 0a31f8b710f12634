"""What the doctests know: an op's example runs twice, on its reference and on the public op."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _torch_in_doctests(doctest_namespace):
    doctest_namespace["torch"] = torch
