"""Kernels for tests of frameworks: those of tests/notebook."""

from tests.notebook.conftest import fresh, unloaded_kernel  # noqa: F401 - fixtures
