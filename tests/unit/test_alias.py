"""`monarch` is another name for `monarch_nb`, module by module."""

import importlib
import importlib.util
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import monarch
import monarch_nb


@pytest.fixture
def sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package `sample` with a module `part`, as if monarch_nb had them."""
    package = tmp_path / "sample"
    package.mkdir()
    (package / "__init__.py").write_text("count = 0\nclass Thing: pass\n")
    (package / "part.py").write_text("from monarch_nb.sample import Thing\nloads = globals().get('loads', 0) + 1\n")
    (package / "broken.py").write_text("import nowhere_to_be_found\n")
    (package / "raising.py").write_text("raise ValueError('no')\n")
    monkeypatch.setattr(monarch_nb, "__path__", [*monarch_nb.__path__, str(tmp_path)])
    importlib.invalidate_caches()
    yield "sample"
    for name in [name for name in sys.modules if name.split(".")[1:2] == ["sample"]]:
        del sys.modules[name]
    vars(monarch_nb).pop("sample", None)


def test_the_package_is_the_same_object_under_both_names() -> None:
    assert monarch is monarch_nb
    assert monarch.__spec__.name == "monarch_nb"


@pytest.mark.usefixtures("sample")
@pytest.mark.parametrize("first", ["monarch", "monarch_nb"])
def test_a_module_is_the_same_object_whichever_name_came_first(first: str) -> None:
    second = "monarch" if first == "monarch_nb" else "monarch_nb"
    module = importlib.import_module(f"{first}.sample.part")
    alias = importlib.import_module(f"{second}.sample.part")
    assert module is alias
    assert sys.modules["monarch.sample.part"] is sys.modules["monarch_nb.sample.part"]
    assert importlib.import_module("monarch.sample") is importlib.import_module("monarch_nb.sample")
    assert module.loads == 1
    assert monarch.sample.part is module


@pytest.mark.usefixtures("sample")
def test_the_real_modules_own_description_is_untouched() -> None:
    module = importlib.import_module("monarch.sample.part")
    assert module.__name__ == "monarch_nb.sample.part"
    assert module.__package__ == "monarch_nb.sample"
    assert module.__spec__.name == "monarch_nb.sample.part"
    assert module.__loader__ is module.__spec__.loader
    assert not module.__spec__._initializing
    assert importlib.import_module("monarch.sample").__spec__.submodule_search_locations


@pytest.mark.usefixtures("sample")
def test_reload_works_through_either_name() -> None:
    module = importlib.import_module("monarch.sample.part")
    assert importlib.reload(module) is module
    assert module.loads == 2
    assert sys.modules["monarch.sample.part"] is module


@pytest.mark.usefixtures("sample")
def test_from_imports_find_names_and_submodules() -> None:
    from monarch.sample import Thing, part

    assert part.Thing is Thing


@pytest.mark.usefixtures("sample")
def test_pickles_name_the_library() -> None:
    from monarch.sample import Thing

    data = pickle.dumps(Thing())
    assert b"monarch_nb.sample" in data
    assert b"monarch.sample" not in data


@pytest.mark.usefixtures("sample")
@pytest.mark.parametrize("name", ["monarch.missing", "monarch.sample.missing"])
def test_a_missing_module_is_named_as_the_user_wrote_it(name: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=f"'{name}'") as caught:
        importlib.import_module(name)
    assert caught.value.name == name
    assert importlib.util.find_spec(name) is None


@pytest.mark.usefixtures("sample")
def test_a_module_that_lacks_something_says_what() -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module("monarch.sample.broken")
    assert caught.value.name == "nowhere_to_be_found"


@pytest.mark.usefixtures("sample")
def test_a_module_that_raises_is_not_left_behind() -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            importlib.import_module("monarch.sample.raising")
        assert "monarch.sample.raising" not in sys.modules
        assert "monarch_nb.sample.raising" not in sys.modules


@pytest.mark.usefixtures("sample")
def test_threads_that_import_at_once_get_one_module() -> None:
    gate = threading.Barrier(8)
    modules: list[object] = []

    def load(name: str) -> None:
        gate.wait(timeout=10)
        modules.append(importlib.import_module(name))

    names = ["monarch.sample.part", "monarch_nb.sample.part"] * 4
    threads = [threading.Thread(target=load, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert len(modules) == 8
    assert len({id(module) for module in modules}) == 1


def test_names_that_only_begin_alike_are_left_to_others() -> None:
    assert importlib.util.find_spec("monarch_missing") is None
    assert importlib.util.find_spec("monarchy") is None


def test_an_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        monarch.nonsense  # noqa: B018


def test_both_orders_of_import_in_a_fresh_interpreter() -> None:
    for order in (
        "import monarch, monarch_nb",
        "import monarch_nb, monarch",
        "import monarch._package, monarch_nb._package",
    ):
        code = f"{order}\nimport sys\nassert sys.modules['monarch'] is sys.modules['monarch_nb']"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=50)


@pytest.mark.sources
def test_a_package_named_monarch_wins_and_ours_stays_reachable(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "monarch").mkdir(parents=True)
    (site / "monarch" / "__init__.py").write_text("theirs = True\n")
    (site / "monarch.py").write_text(Path(__file__).parents[2].joinpath("kernel_ext", "monarch.py").read_text())
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "import monarch, monarch_nb\n"
        "assert monarch.theirs and monarch is not monarch_nb\n"
        "assert not hasattr(monarch_nb, 'theirs')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)


def test_the_extension_is_loaded_by_the_kernels_side(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, object]] = []
    side = SimpleNamespace(
        load_ipython_extension=lambda ip: calls.append(("load", ip)),
        unload_ipython_extension=lambda ip: calls.append(("unload", ip)),
    )
    monkeypatch.setitem(sys.modules, "monarch_kernel", side)
    shell = object()
    monarch.load_ipython_extension(shell)
    monarch_nb.unload_ipython_extension(shell)
    assert calls == [("load", shell), ("unload", shell)]
