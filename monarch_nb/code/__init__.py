"""Distribution of code to running processes: edited modules, whole workspaces, and new classes for living actors."""

from typing import TYPE_CHECKING

from monarch_nb._package import lazy_names

if TYPE_CHECKING:
    from monarch_nb.code.modules import local_modules
    from monarch_nb.code.packages import Installed, PipError, run_pip
    from monarch_nb.code.reload import Report, objection, owned_actors, reload_code, reload_each, reload_mesh, sync

__all__ = [
    "Installed",
    "PipError",
    "Report",
    "local_modules",
    "objection",
    "owned_actors",
    "reload_code",
    "reload_each",
    "reload_mesh",
    "run_pip",
    "sync",
]

__getattr__ = lazy_names(
    __name__,
    {
        "modules": ("local_modules",),
        "packages": ("Installed", "PipError", "run_pip"),
        "reload": ("Report", "objection", "owned_actors", "reload_code", "reload_each", "reload_mesh", "sync"),
    },
)
