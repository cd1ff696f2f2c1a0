"""Private names of torchmonarch that mean nothing here, and that programs import beside others which do.

They import, so that the rest of such a program works, and raise NotImplementedError when they are used.
"""

from typing import Any

from monarch_nb._absent import refuse

_HYPERACTOR = "monarch._rust_bindings.monarch_hyperactor."

NAMES: dict[str, str] = {
    f"{_HYPERACTOR}actor": "CallbacksPending MethodSpecifier PortProtocol",
    f"{_HYPERACTOR}host_mesh": "PyMeshAdminRef",
    f"{_HYPERACTOR}pickle": (
        "PendingMessage _get_mesh_pop_count _get_pending_reserve_count _reset_mesh_pop_count "
        "_reset_pending_reserve_count pickle"
    ),
    f"{_HYPERACTOR}pympsc": "PyTestSender Receiver channel_for_test",
    f"{_HYPERACTOR}testing": "_make_handle_probe _sync_inbox_for_test",
    "monarch._src.actor.host_mesh": "_spawn_admin",
    "monarch._src.actor.logging": "LoggingManager flush_all_proc_mesh_logs",
    "monarch._src.job.spmd": "_parse_torchrun",
    "monarch._src.actor.proc_mesh": "HyProcMesh",
}


class _Refused(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        refuse(f"{cls.__module__}.{cls.__name__}", "the inside of torchmonarch")


_made: dict[str, type] = {}


def refused(name: str) -> type | None:
    """What stands for a private name, given in full; None for names that are not kept."""
    module, _, last = name.rpartition(".")
    if last not in NAMES.get(module, "").split():
        return None
    if name not in _made:
        _made[name] = _Refused(last, (), {"__module__": module, "__doc__": "Not there: raises NotImplementedError."})
    return _made[name]
