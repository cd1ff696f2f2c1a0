"""One JupyterLab and one browser for all tests of a folder, which run one after the other."""

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.processes import MARK
from tests.browser.lab import Desk, browser, browser_path, serve
from tests.effort import AS_LATER

_running = contextlib.ExitStack()
_HERE = Path(__file__).parent
# The browser's driver leaves objects of its own to the collector.
_UNCLEAN = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == _HERE:
            item.add_marker(_UNCLEAN)


@pytest.fixture(scope="session")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    browser_path()
    mark = secrets.token_hex(8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONARCH_NB_PRELOAD", AS_LATER)  # as a user's kernels would be
        served = _running.enter_context(serve(tmp_path_factory.mktemp("lab"), {MARK: mark}))
    desk = Desk(served, _running.enter_context(browser()).new_context(), mark)
    _running.callback(desk.close)
    yield desk
    _running.close()  # where the last test was not reached


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Ended by the last of these tests, or after its error: while the driver runs, no event loop can run."""
    try:
        return (yield)
    finally:
        if nextitem is None or nextitem.path.parent != item.path.parent:
            _running.close()
