"""Spawning, stopping and healing of processes and actors, and unhandled failures."""

from typing import TYPE_CHECKING

from monarch_nb._package import lazy_names

if TYPE_CHECKING:
    from monarch_nb.lifecycle.actor_spawn import spawn_actors
    from monarch_nb.lifecycle.controllers import get_or_spawn_controller
    from monarch_nb.lifecycle.elastic import grow_hosts, grow_procs, shrink_hosts, shrink_procs
    from monarch_nb.lifecycle.heal import heal_mesh, kill_mesh
    from monarch_nb.lifecycle.interrupts import interrupt
    from monarch_nb.lifecycle.proc_spawn import spawn_procs
    from monarch_nb.lifecycle.unhandled import exit_on_fault, notebook_mode

__all__ = [
    "exit_on_fault",
    "get_or_spawn_controller",
    "grow_hosts",
    "grow_procs",
    "heal_mesh",
    "interrupt",
    "kill_mesh",
    "notebook_mode",
    "shrink_hosts",
    "shrink_procs",
    "spawn_actors",
    "spawn_procs",
]

__getattr__ = lazy_names(
    __name__,
    {
        "elastic": ("grow_hosts", "grow_procs", "shrink_hosts", "shrink_procs"),
        "proc_spawn": ("spawn_procs",),
        "actor_spawn": ("spawn_actors",),
        "controllers": ("get_or_spawn_controller",),
        "heal": ("heal_mesh", "kill_mesh"),
        "interrupts": ("interrupt",),
        "unhandled": ("exit_on_fault", "notebook_mode"),
    },
)
