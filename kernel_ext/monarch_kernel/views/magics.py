"""A magic for each view that has one."""

from typing import TYPE_CHECKING, Any

from ..jupyter import line_magic_of
from ..session import Session
from .live import LiveView, LiveViews

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


class ViewMagics:
    """`%failures`, `%metrics`, and those of views that are registered later. `%logs` is in output/log_magics."""

    def __init__(self, shell: "InteractiveShell", session: Session) -> None:
        self._shell: Any = shell  # IPython types magics as methods
        self._session = session

    def install(self, views: LiveViews) -> None:
        """Registers the magics of current and later views."""
        self._end = views.follow(self._add, self._remove)

    def uninstall(self) -> None:
        """Stops registering; registered magics stay, as all magics do."""
        self._end()

    def _add(self, view: LiveView) -> None:
        if view.magic is None:
            return
        magic = line_magic_of(self._shell, view.name)
        if magic is not None and not isinstance(magic, _Magic):
            raise ValueError(f"there is a magic %{view.name} already: choose another name for the view")
        self._shell.register_magic_function(_Magic(view, self._session), "line", view.name)

    def _remove(self, view: LiveView) -> None:
        magics = self._shell.magics_manager.magics["line"]
        if isinstance(magics.get(view.name), _Magic):
            del magics[view.name]


class _Magic:
    def __init__(self, view: LiveView, session: Session) -> None:
        assert view.magic is not None
        self._show, self._session = view.magic, session
        self.__name__, self.__doc__ = view.name, view.magic.__doc__

    def __call__(self, line: str) -> object:
        return self._show(self._session, line)
