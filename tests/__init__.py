import pytest

pytest.register_assert_rewrite("tests.helpers")  # so that what its assertions compare is shown
