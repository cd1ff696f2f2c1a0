"""How processes and actors begin, are healed, and what becomes of failures that nobody handles."""

from typing import TYPE_CHECKING

from monarch_nb._lazy import lazy_names

if TYPE_CHECKING:
    from monarch_nb.lifecycle.actor_spawn import spawn_actors
    from monarch_nb.lifecycle.heal import heal_mesh
    from monarch_nb.lifecycle.spawned import (
        get_active_proc_meshes,
        register_proc_mesh_spawn_callback,
        unregister_proc_mesh_spawn_callback,
    )
    from monarch_nb.lifecycle.unhandled import exit_on_fault, notebook_mode

__all__ = [
    "exit_on_fault",
    "get_active_proc_meshes",
    "heal_mesh",
    "notebook_mode",
    "register_proc_mesh_spawn_callback",
    "spawn_actors",
    "unregister_proc_mesh_spawn_callback",
]

__getattr__ = lazy_names(
    __name__,
    {
        "actor_spawn": ("spawn_actors",),
        "heal": ("heal_mesh",),
        "spawned": (
            "get_active_proc_meshes",
            "register_proc_mesh_spawn_callback",
            "unregister_proc_mesh_spawn_callback",
        ),
        "unhandled": ("exit_on_fault", "notebook_mode"),
    },
)
