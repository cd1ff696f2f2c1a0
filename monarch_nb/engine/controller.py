"""The process of a notebook kernel, or of a script: the controller."""

import secrets
import sys
from importlib import import_module
from pathlib import Path

from monarch_nb._package import on_exit
from monarch_nb.connect.own_hosts import LocalAgents, at_exit
from monarch_nb.connect.remote_host import await_return, connection, undelivered
from monarch_nb.engine.compose import ProcessRole, compose
from monarch_nb.host.folders import make_run_folder, new_host_id, run_folder_for
from monarch_nb.host.launch import take_ahead
from monarch_nb.lifecycle import unhandled
from monarch_nb.lifecycle.watching import ProcessWatcher
from monarch_nb.routing.actions import LinkConfig
from monarch_nb.runtime import Future, ProcessTables, Runtime, install_breakpoints, waiting
from monarch_nb.supervision import Driver
from monarch_nb.transport import Node, ThreadClock
from monarch_nb.wire import agent_of, begin_host_names, controller_address, host_name, register_pickle_by_value

LONG_S = 1.0  # length of a wait from which the module that explains it is loaded


class LongWaits(waiting.WaitObserver):
    """Explains long waits where no other observer does: in scripts. The first long wait loads the module."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._report: waiting.WaitObserver | None = None

    def tick(self, future: Future[object], seconds: float) -> None:
        """Called each tenth of a second of a wait."""
        if seconds < LONG_S or any(observer.explains_long_waits for observer in waiting.observers.members):
            return
        if self._report is None:
            try:
                self._report = import_module("monarch_nb.diagnosis.collector").HangReport(self._runtime)
            except OSError:
                return  # no descriptor is left to read it with, which may be why this waits: a later tick tries again
        self._report.tick(future, seconds)


def become_controller() -> Runtime:
    """Makes this process a controller. No process is started yet."""
    begin_host_names()
    ahead = take_ahead()
    host = new_host_id() if ahead is None else ahead.agent.host
    folder = run_folder_for(host)
    make_run_folder(folder)
    local = ProcessTables(controller_address(host, secrets.token_hex(4)))
    host_name(host)  # the first host gets the plain name of this machine
    node = Node(
        local.address,
        run_folders={host: Path(folder)},
        agent=None,
        handler=lambda header, parcel: runtime.handle(header, parcel),
        on_link_failed=lambda header, parcel, reason: undelivered(runtime, header, reason),
        on_connection=lambda address, up, word: connection(runtime, address, up),
        on_first_dial=lambda address: runtime.part(ProcessWatcher).on_first_message(address),
        config=LinkConfig(down_timeout=None),  # its RemoteHost decides whether a host is lost
    )
    role = ProcessRole(
        agent_of(host),
        fatal=unhandled.unhandled,
        show=unhandled.report,
        revive=lambda hosts: agents.revive(hosts),
        await_host=lambda host, seconds: await_return(runtime, host, seconds),
    )
    runtime = compose(local, node, ThreadClock(), role)
    agents = runtime.add_part(LocalAgents, LocalAgents(runtime, ahead))
    runtime.start()
    install_breakpoints()  # for actors of this process
    waiting.join(LongWaits(runtime))
    main = sys.modules.get("__mp_main__")
    if main is not None:  # the script's name in a child of multiprocessing, and only there
        register_pickle_by_value(main)
    unhandled.prepare()
    if unhandled.in_marimo():
        runtime.part(Driver).in_notebook(unhandled.report)
    on_exit(at_exit)
    return runtime
