"""What a test of a framework needs, and how it says that it was left out."""

import importlib.util

import pytest


def need(*modules: str) -> None:
    """Skips the test unless all modules are installed."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"NOT TESTED HERE: {', '.join(missing)} not installed; `make test-frameworks` installs it")
