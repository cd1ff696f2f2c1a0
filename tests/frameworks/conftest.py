"""Kernels for tests of frameworks: those of tests/notebook."""

from tests.browser.conftest import desk, pytest_runtest_teardown  # noqa: F401 - a fixture, and its end
from tests.notebook.conftest import fresh, unloaded_kernel  # noqa: F401 - fixtures
