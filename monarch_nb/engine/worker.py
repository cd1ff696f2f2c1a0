"""The main function of a spawned process: it joins its proc mesh, and runs until it is stopped."""

import os
import sys
import threading
from pathlib import Path

from monarch_nb.collectives.groups import PROCESS_GROUPS
from monarch_nb.diagnosis import gradients
from monarch_nb.engine.compose import ProcessRole, compose
from monarch_nb.host.gpus import NO_GPU
from monarch_nb.host.protocol import ProcSpec, ProcStop
from monarch_nb.host.verbs import PROC_STOP
from monarch_nb.lifecycle.proc_spawn import PYTHON, python_version
from monarch_nb.lifecycle.watching import ProcessWatcher
from monarch_nb.logs import MeshLogs
from monarch_nb.logs.journal import journal_of_this_process
from monarch_nb.mesh.console import Console
from monarch_nb.runtime import (
    ROOT,
    Actor,
    ActorCell,
    ProcessTables,
    RunsOn,
    Runtime,
    SpawnActor,
    current,
    install,
    install_breakpoints,
)
from monarch_nb.runtime.actors.interrupts import install_sleep
from monarch_nb.runtime.output.displays import install_display
from monarch_nb.runtime.output.own_log import levels_are_known, register_stacks, stacks_file
from monarch_nb.settings import TRAVELS_IN, settings
from monarch_nb.shape import RegionForm
from monarch_nb.telemetry import trainers
from monarch_nb.transport import Node, ThreadClock
from monarch_nb.wire import Asker, flush_output, land_on_gpus

_LOST_S = 1.0  # for the clean-up of actors in a process that cannot use its GPU any more


def run_proc(spec: ProcSpec) -> int:
    """Runs a process of a mesh; returns its exit status when it is stopped. On the main thread."""
    python = spec.env.get(PYTHON)
    if python is not None and python != python_version():
        sys.stderr.write(
            f"{spec.name} runs Python {python_version()} ({sys.executable}), its controller Python {python}: functions "
            "and classes cannot travel between them. Use an interpreter of the same minor version on both sides\n"
        )
        return 1
    if without := spec.env.get(NO_GPU):
        sys.stderr.write(f"{spec.name}: {without}\n")
        return 1
    settings.receive(spec.env.get(TRAVELS_IN) or "")
    os.environ.pop(TRAVELS_IN, None)
    local = ProcessTables(spec.address)
    node = Node(
        spec.address,
        run_folders={spec.host: Path(spec.run_folder)},
        agent=spec.agent,
        handler=lambda header, parcel: runtime.handle(header, parcel),
        on_link_failed=lambda header, parcel, reason: runtime.undelivered(header, reason),
        on_first_dial=lambda address: runtime.part(ProcessWatcher).on_first_message(address),
    )
    role = ProcessRole(spec.agent, is_worker=True, root_id=f"<{spec.name or 'proc'}>", python=spec.python)
    runtime = compose(local, node, ThreadClock(), role)
    land_on_gpus()
    node.announce_gpu()
    install_breakpoints()
    register_stacks(spec.run_folder, spec.address)
    install(runtime)
    install_sleep()
    journal = journal_of_this_process()
    if journal is not None:
        runtime.log.keep(journal)
        levels_are_known()
        install_display()
        trainers.install()
        gradients.install()
    PROCESS_GROUPS.watch(_constructed)
    runtime.begin_setup()
    console = host_console(runtime, spec, Console(spec.rank), runs_on=RunsOn.MAIN_THREAD)

    def stop(request: ProcStop, asker: Asker[None]) -> None:
        threading.Thread(target=leave, args=(request,), name="monarch-stop", daemon=True).start()

    def leave(request: ProcStop) -> None:
        reason = request.reason or "its process was stopped"
        runtime.stop_actors(reason, max(0.1, request.timeout_s - 0.5))
        console.stop(reason)

    gpu_errors: list[str] = []

    def gpu_lost(reason: str) -> None:
        gpu_errors.append(reason)
        threading.Thread(target=leave, args=(ProcStop(reason, _LOST_S),), name="monarch-stop", daemon=True).start()

    runtime.failures.on_gpu_lost.append(gpu_lost)
    runtime.verbs.handle(PROC_STOP, stop)
    runtime.start()
    node.begin(spec.owner)
    console.executor.run()  # type: ignore[union-attr]
    runtime.part(MeshLogs).close()
    stacks_file(spec.run_folder, spec.address).unlink(missing_ok=True)
    runtime.close()
    if gpu_errors:
        sys.stderr.write(f"{spec.name}: {gpu_errors[0]}\n")
    flush_output()
    return int(bool(gpu_errors))


def _constructed() -> tuple[str, int] | None:
    """Returns the actor whose `__init__` runs on this thread."""
    context = current.get()
    cell = context.actor_instance.cell if context is not None else None
    return (cell.mesh, cell.rank) if isinstance(cell, ActorCell) and cell.constructing is not None else None


def host_console(runtime: Runtime, spec: ProcSpec, console: Actor, *, runs_on: RunsOn = RunsOn.ITS_OWN) -> ActorCell:
    """Returns the actor on which a worker's set-up and cells run."""
    actor_spec = SpawnActor(
        name=spec.name,
        class_name="Console",
        kind="sync",
        region=RegionForm(offset=spec.rank),
        owner="",
        owner_process=spec.owner,
        creators=(ROOT,),
        runs_on=runs_on,
    )
    return runtime.host_actor(actor_spec, spec.mesh, spec.rank, spec.incarnation, console)
