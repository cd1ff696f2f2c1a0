"""The names that programs written for torchmonarch import."""

import importlib
import importlib.util
import pickle
import subprocess
import sys
import warnings

import pytest

import monarch
import monarch.actor
from monarch_nb import _compat
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
def test_a_name_of_the_package_is_there_or_says_that_it_is_not_yet(name: str) -> None:
    if name in monarch.__all__:
        assert getattr(monarch, name) is not None
        return
    with pytest.raises(ImportError, match=rf"monarch\.{name} is not there yet: it belongs to"):
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
    found: dict[str, object] = {}
    for name in names.split():
        exec(f"from {module} import {name}", found)
        homes = [importlib.import_module(home) for home in _compat.ALIASES[module]]
        assert any(vars(home).get(name) is found[name] for home in homes)
    assert importlib.util.find_spec(module) is not None


def test_a_private_path_is_a_module_like_others() -> None:
    import monarch._src.actor.actor_mesh as module
    from monarch._src.actor import actor_mesh

    assert module is actor_mesh is sys.modules["monarch._src.actor.actor_mesh"]
    assert module.__name__ == "monarch._src.actor.actor_mesh"
    assert pickle.loads(pickle.dumps(module.Future)) is monarch.actor.Future
    assert pickle.dumps(module.Future).count(b"monarch_nb") == 1


def test_a_private_name_without_counterpart_says_so() -> None:
    with pytest.raises(ImportError, match=r"actor_mesh\._client_context is private to torchmonarch"):
        from monarch._src.actor.actor_mesh import _client_context  # noqa: F401


def test_unknown_private_modules_are_not_there() -> None:
    for name in ("monarch._src.actor.mpsc", "monarch._rust_bindings.monarch_hyperactor.pytokio", "monarch.nonsense"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)


@pytest.mark.parametrize("module", sorted(_compat.MODULES))
def test_a_part_that_is_not_there_yet_says_so(module: str) -> None:
    for name in (module, f"{module}.inside"):
        with pytest.raises(
            ImportError, match=r"is not there yet: it belongs to .*, see https://.*/docs/compatibility\.md"
        ):
            importlib.import_module(name)


def _there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module.replace("monarch", "monarch_nb", 1)) is not None
    except ModuleNotFoundError:
        return False


def test_the_table_of_what_is_not_there_names_nothing_that_is() -> None:
    assert [name for name in _compat.MODULES if _there(name)] == []
    assert set(_compat.NAMES) & set(monarch.__all__) == set()
    for module, names in _compat.OTHERS.items():
        assert set(names) & set(vars(importlib.import_module(module))) == set()


def test_looking_at_all_that_the_package_lists_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in dir(monarch):
            getattr(monarch, name)


def test_aliases_are_not_loaded_before_they_are_needed() -> None:
    code = "import monarch, sys; assert 'monarch_nb._compat' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)
