"""The names that programs written for torchmonarch import."""

import asyncio
import importlib
import importlib.util
import pickle
import re
import subprocess
import sys
import textwrap
import warnings

import pytest

import monarch
import monarch.actor
from monarch_nb import compat, exceptions
from tests.unit.upstream_names import ACTOR, CONFIG, HIDDEN, TOP

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("name", sorted({*ACTOR, *HIDDEN}))
def test_a_name_of_the_actor_api_has_a_public_home(name: str) -> None:
    assert hasattr(monarch.actor, name)
    assert name in monarch.actor.__all__


@pytest.mark.parametrize("name", CONFIG)
def test_a_name_of_the_configuration_is_there(name: str) -> None:
    assert name in importlib.import_module("monarch.config").__all__


@pytest.mark.parametrize("name", TOP)
def test_every_package_name_exists_or_says_that_it_does_not(name: str) -> None:
    if name in monarch.__all__ or name in monarch._MODULES:
        assert getattr(monarch, name) is not None
        return
    with pytest.raises(ImportError, match=rf"monarch\.{name} is not part of Monarch-NB yet: it belongs to"):
        exec(f"from monarch import {name}")


def test_other_names_are_plain_errors() -> None:
    assert not hasattr(monarch, "nonsense")
    assert not hasattr(monarch, "_ipython_display_")
    assert not hasattr(monarch.actor, "nonsense")
    with pytest.raises(ImportError, match="cannot import name 'nonsense'"):
        exec("from monarch.actor import nonsense")


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("monarch._rust_bindings.monarch_hyperactor.supervision", "SupervisionError MeshFailure"),
        ("monarch._rust_bindings.monarch_hyperactor.shape", "Extent Point Region Shape Slice"),
        ("monarch._rust_bindings.monarch_hyperactor.channel", "ChannelTransport"),
        ("monarch._rust_bindings.monarch_hyperactor.config", "configure Encoding"),
        ("monarch._rust_bindings.monarch_hyperactor.handle", "WouldBlockRuntime"),
        ("monarch._rust_bindings.monarch_hyperactor.host_mesh", "BootstrapCommand"),
        ("monarch._rust_bindings.monarch_hyperactor.mailbox", "UndeliverableMessageEnvelope"),
        ("monarch._rust_bindings.monarch_hyperactor.proc", "ProcId Uid"),
        ("monarch._src.actor", "config"),
        ("monarch._src.actor.actor_mesh", "ActorMesh Actor Channel Port PortReceiver context Accumulator ValueMesh"),
        ("monarch._src.actor.bootstrap", "attach_to_workers run_worker_loop_forever start_worker_loop_forever"),
        ("monarch._src.actor.endpoint", "endpoint Extent Endpoint"),
        ("monarch._src.actor.future", "Future"),
        ("monarch._src.actor.host_mesh", "HostMesh this_host this_proc default_bootstrap_cmd"),
        ("monarch._src.actor.proc_mesh", "ProcMesh get_or_spawn_controller register_proc_mesh_spawn_callback"),
        ("monarch._src.actor.returns_future", "returns_future"),
        ("monarch._src.actor.shape", "Extent NDSlice Shape MeshTrait"),
        ("monarch._src.actor.telemetry", "span traced get_meter"),
        ("monarch.actor.concurrent", "concurrent_endpoint"),
        ("monarch.actor_mesh", "Actor"),
        ("monarch.proc_mesh", "ProcMesh get_active_proc_meshes"),
    ],
)
def test_private_paths_lead_to_the_public_names(module: str, names: str) -> None:
    namespace: dict[str, object] = {}
    for name in names.split():
        exec(f"from {module} import {name}", namespace)
        homes = [importlib.import_module(home) for home in compat.ALIASES[module]]
        assert any(vars(home).get(name) is namespace[name] for home in homes)
    assert importlib.util.find_spec(module) is not None


def test_a_private_path_is_a_module_like_others() -> None:
    import monarch._src.actor.actor_mesh as module
    from monarch._src.actor import actor_mesh

    assert module is actor_mesh is sys.modules["monarch._src.actor.actor_mesh"]
    assert module.__name__ == "monarch._src.actor.actor_mesh"
    assert pickle.loads(pickle.dumps(module.Future)) is monarch.actor.Future
    assert pickle.dumps(module.Future).count(b"monarch_nb") == 1


def test_a_star_import_from_a_private_path_brings_the_public_names() -> None:
    namespace: dict[str, object] = {}
    exec("from monarch._src.actor.actor_mesh import *", namespace)
    assert {"Actor", "ActorMesh", "Port", "context", "endpoint"} <= set(namespace)
    assert {"ProcMesh", "get_active_proc_meshes"} <= set(dir(importlib.import_module("monarch.proc_mesh")))


def test_a_private_name_without_counterpart_says_so() -> None:
    with pytest.raises(ImportError, match=r"actor_mesh\._init_instance is private to torchmonarch"):
        from monarch._src.actor.actor_mesh import _init_instance  # noqa: F401


def test_every_submodule_of_an_alias_can_be_imported_from_it() -> None:
    code = """
        import importlib, sys
        import monarch
        from monarch_nb.compat import ALIASES
        for name in ALIASES:
            parent, _, leaf = name.rpartition('.')
            for loaded in [key for key in sys.modules if key in ALIASES]:
                del sys.modules[loaded]
            namespace = {}
            exec(f'from {parent} import {leaf}', namespace)
            assert namespace[leaf] is importlib.import_module(name), name
            assert hasattr(importlib.import_module(parent), leaf), name
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=50)


@pytest.mark.parametrize("name", sorted({*compat.NAMES, "worker"}))
def test_missing_names_can_be_tested_for(name: str) -> None:
    assert not hasattr(monarch, name)
    assert getattr(monarch, name, None) is None
    with pytest.raises(AttributeError, match=rf"monarch\.{name} is not part of Monarch-NB yet: it belongs to"):
        getattr(monarch, name)


@pytest.mark.parametrize("module", ["monarch._src.actor.actor_mesh", "monarch._src.actor", "monarch.tools.config"])
def test_a_name_that_an_alias_lacks_can_be_asked_for(module: str) -> None:
    alias = importlib.import_module(module)
    assert not hasattr(alias, "nonsense")
    with pytest.raises(AttributeError, match=r"nonsense .*no counterpart here"):
        alias.nonsense  # noqa: B018


def test_the_library_says_so_too_when_imported_by_its_own_name() -> None:
    code = "from monarch_nb import Selection"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert "monarch.Selection is not part of Monarch-NB yet: it belongs to torchmonarch" in done.stderr


IMPORTED_BY_PROGRAMS = """
from monarch.rdma import RDMABuffer, RDMAAction, is_rdma_available, is_ibverbs_available, get_rdma_backend
from monarch.rdma import RDMAReadTransferWarning, RDMAWriteTransferWarning, RDMATcpFallbackWarning
from monarch._src.rdma.rdma import RDMABuffer, is_rdma_available
from monarch.job import SlurmJob, KubernetesJob, ImageSpec, KubeConfig, JobTrait
from monarch.job.kubernetes import KubernetesJob, ImageSpec, KubeConfig
from monarch.job.spmd import serve, SPMDJob, StoreJob
from monarch._src.job.slurm import SlurmJob
from monarch._src.job.kubernetes import KubernetesJob
from monarch._src.job.spmd import serve
from monarch._src.job.telemetry_config import TelemetryConfig
from monarch._src.actor.endpoint import EndpointProperty, NotAnEndpoint
from monarch._src.actor.actor_mesh import EndpointProperty, Instance
from monarch._src.actor.shape import ShapeExt, iter_ranks, Slices
from monarch.tools.network import AddrType, get_ipaddr, get_sockaddr
from monarch.tools.config import Config, Workspace, NOT_SET
from monarch.tools.config.workspace import Workspace
from monarch.tools.config.environment import CondaEnvironment
from monarch.tools.utils import MONARCH_HOME, conda
from monarch.tools import network, utils
from monarch._src.actor.mock import patch_actor, get_actor_class
from monarch._src.actor.actor_mesh import configure, _context
from monarch._src.actor.ipython_check import is_ipython
from monarch._src.actor.sync_state import fake_sync_state
from monarch._src.actor.proc_mesh import _get_bootstrap_args, get_active_proc_meshes
from monarch._src.job.job import BatchJob, LoginJob, ProcessState, SSHJob
from monarch._rust_bindings.monarch_hyperactor.channel import BindSpec, ChannelTransport
from monarch._src.actor.pickle import flatten, unflatten
from monarch._src.actor.telemetry import TracingForwarder
from monarch._src.actor.bootstrap_main import invoke_main
"""


@pytest.mark.parametrize("line", IMPORTED_BY_PROGRAMS.split("\n")[1:-1])
def test_top_level_imports_of_known_programs_work(line: str) -> None:
    exec(line)


def test_nothing_is_available_that_is_there_in_name_only() -> None:
    rdma = importlib.import_module("monarch.rdma")
    assert monarch.rdma is rdma
    assert rdma.get_rdma_backend() == ("ibverbs" if rdma.is_ibverbs_available() else "tcp")
    with pytest.warns(DeprecationWarning, match="RDMABuffer always works"):
        assert rdma.is_rdma_available()
    assert issubclass(rdma.RDMATcpFallbackWarning, Warning)


@pytest.mark.parametrize("use", ["BatchJob()"])
def test_using_a_placeholder_name_says_what_to_do_instead(use: str) -> None:
    from monarch._src.job.job import BatchJob

    with pytest.raises(NotImplementedError, match=r"is not part of Monarch-NB yet: it belongs to .*, see .*\. [A-Zm]"):
        eval(use, {"BatchJob": BatchJob})


def test_a_transport_that_was_read_back_can_be_compared() -> None:
    from monarch._rust_bindings.monarch_hyperactor.channel import BindSpec, ChannelTransport
    from monarch.config import configured

    for transport in (ChannelTransport.TcpWithLocalhost, "tcp", "tcp://127.0.0.1:8080"):
        with configured(default_transport=transport) as inside:
            assert inside["default_transport"] == BindSpec(transport)


def test_code_for_synchronous_callers_runs_within_a_loop() -> None:
    from monarch._src.actor.sync_state import fake_sync_state, in_fake_sync_state

    async def main() -> None:
        with fake_sync_state():
            assert in_fake_sync_state()
            with pytest.raises(RuntimeError):
                asyncio.get_running_loop()
        asyncio.get_running_loop()

    asyncio.run(main())
    assert not in_fake_sync_state()


def test_a_placeholder_job_is_a_job_class() -> None:
    from monarch._src.job.job import BatchJob
    from monarch.job import JobTrait

    class Mine(BatchJob):
        pass

    assert issubclass(Mine, JobTrait)
    with pytest.raises(NotImplementedError, match="Mine is not part of Monarch-NB yet: it belongs to batch jobs"):
        Mine()


def test_unknown_private_modules_are_not_there() -> None:
    for name in ("monarch._src.actor.mpsc", "monarch._rust_bindings.monarch_hyperactor.pywaker", "monarch.nonsense"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)


def test_a_missing_module_says_what_to_do_without_it() -> None:
    for name in ("monarch.world_mesh", "monarch.tools.cli"):
        assert re.search(r"compatibility\.md\. [A-Zm]", compat.missing_part(name) or "")


@pytest.mark.parametrize("module", sorted(compat.MODULES))
def test_a_part_that_is_not_there_yet_says_so(module: str) -> None:
    for name in (module, f"{module}.inside"):
        with pytest.raises(
            ImportError, match=r"is not part of Monarch-NB yet: it belongs to .*, see https://.*/docs/compatibility\.md"
        ):
            importlib.import_module(name)


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module.replace("monarch", "monarch_nb", 1)) is not None
    except ModuleNotFoundError:
        return False


def test_the_table_of_what_is_not_there_names_nothing_that_is() -> None:
    assert [name for name in compat.MODULES if _exists(name)] == []
    assert set(compat.NAMES) & set(monarch.__all__) == set()
    assert set(compat.ALIASES) & set(compat.MODULES) == set()


def test_looking_at_all_that_the_package_lists_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in dir(monarch):
            getattr(monarch, name)


def test_mesh_errors_are_device_mesh_errors_and_endpoint_errors_are_not() -> None:
    assert issubclass(monarch.actor.SupervisionError, exceptions.DeviceMeshError)
    assert issubclass(exceptions.DeviceMeshError, RuntimeError)
    assert not issubclass(monarch.actor.ActorError, exceptions.DeviceMeshError)
    assert not issubclass(monarch.actor.MeshFailure, BaseException)


def test_aliases_are_not_loaded_before_they_are_needed() -> None:
    code = "import monarch, sys; assert 'monarch_nb.compat' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)
