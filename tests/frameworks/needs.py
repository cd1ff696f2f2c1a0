"""Requirements of a test of a framework, and the message if it is left out."""

import importlib.util

import pytest


def need(*modules: str) -> None:
    """Skips the test unless all modules are installed."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"NOT TESTED HERE: {', '.join(missing)} not installed; `make test-frameworks` installs it")
