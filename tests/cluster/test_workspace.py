"""Edited modules reach the processes and actors that run their code."""

import asyncio
import importlib
import os
import pickle
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch_nb.actor import Actor, endpoint, this_host
from monarch_nb.code import modules
from monarch_nb.code.reload import reload_code
from monarch_nb.connect import attach_hosts
from monarch_nb.transport import Keys
from tests.cluster.hosts_tools import user_hosts

pytestmark = pytest.mark.timeout(120)

HELPER = "FACTOR = {factor}\n\ndef scaled(x):\n    return FACTOR * x\n"
MODEL = """
from monarch_nb.actor import Actor, endpoint
from {helper} import scaled

class Counter(Actor):
    def __init__(self):
        self.n = 0

    @endpoint
    def add(self, k):
        self.n += scaled(k)
        return self.n
"""
TWICE = """
    @endpoint
    def twice(self):
        return 2 * self.n
"""


class Code:
    """A folder with two modules of names of their own, imported by nobody else."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.helper = f"helper_{folder.name.replace('-', '_')}"
        self.model = f"model_{folder.name.replace('-', '_')}"
        self.edit(1)

    def edit(self, factor: int, more: str = "", model: str = MODEL) -> None:
        (self.folder / f"{self.helper}.py").write_text(HELPER.format(factor=factor))
        source = (model + more).format(helper=self.helper)
        path = self.folder / f"{self.model}.py"
        if not path.exists() or path.read_text() != source:
            path.write_text(source)

    @property
    def module(self):
        return importlib.import_module(self.model)


@pytest.fixture
def code(tmp_path: Path, monkeypatch) -> Iterator[Code]:
    monkeypatch.syspath_prepend(str(tmp_path))
    instance = Code(tmp_path)
    yield instance
    for name in (instance.helper, instance.model):
        sys.modules.pop(name, None)


@pytest.fixture
def procs(code: Code):
    mesh = this_host().spawn_procs(per_host={"gpus": 2}, name="code")
    yield mesh
    mesh.stop().get(20)


def sync(*args, **kwargs):
    asyncio.run(this_host().sync_workspace(*args, **kwargs))


def test_living_actors_take_edited_code_over_and_keep_state(code, procs):
    counters = procs.spawn("counters", code.module.Counter)
    assert counters.add.call(1).get(40).values() == [1, 1]
    code.edit(10, TWICE)
    sync(code.folder, auto_reload=True)
    assert counters.add.call(1).get(40).values() == [11, 11]
    assert counters.twice.call().get(40).values() == [22, 22]


def test_a_module_that_imports_an_edited_one_is_loaded_again_too(code, procs):
    counters = procs.spawn("counters", code.module.Counter)
    counters.add.call(1).get(40)
    code.edit(100)  # of the two only the helper
    report = reload_code([str(code.folder)], procs=[procs])
    assert report.modules == (code.helper, code.model)
    assert report.meshes == ("counters",)
    assert counters.add.call(1).get(40).values() == [101, 101]


def test_without_auto_reload_running_code_stays(code, procs):
    counters = procs.spawn("counters", code.module.Counter)
    counters.add.call(1).get(40)
    code.edit(10)
    sync(code.folder)
    assert counters.add.call(1).get(40).values() == [2, 2]


def test_nothing_edited_is_nothing_done(code, procs):
    counters = procs.spawn("counters", code.module.Counter)
    counters.add.call(1).get(40)
    code.edit(10)
    reload_code([str(code.folder)], procs=[procs])
    report = reload_code([str(code.folder)], procs=[procs])
    assert (report.modules, report.meshes, str(report)) == ((), (), "nothing has changed")


def test_a_syntax_error_is_told_before_anything_changes(code, procs):
    counters = procs.spawn("counters", code.module.Counter)
    counters.add.call(1).get(40)
    code.edit(10, "\n    def broken(:\n")
    with pytest.raises(SyntaxError):
        sync(code.folder, auto_reload=True)
    assert counters.add.call(1).get(40).values() == [2, 2]


def test_actors_that_cannot_follow_keep_their_class_and_it_is_said(code, procs):
    counters = procs.spawn("counters", code.module.Counter)
    counters.add.call(1).get(40)
    code.edit(10, model=MODEL.replace("    def add", "    async def add"))
    with pytest.warns(UserWarning, match="counters keeps its old class: Counter is async now and was sync"):
        sync(code.folder, auto_reload=True)


class Parent(Actor):
    """Imports in an endpoint, and owns actors of its own."""

    @endpoint
    def spawn(self, module: str) -> int:
        self.children = this_host().spawn_procs(name="nested").spawn("kids", importlib.import_module(module).Counter)
        return self.children.add.call_one(1).get(20)

    @endpoint
    def add(self) -> int:
        return self.children.add.call_one(1).get(20)


def test_actors_that_actors_own_take_it_over_too(code, procs):
    parent = procs.slice(gpus=0).spawn("parent", Parent)
    assert parent.spawn.call_one(code.model).get(20) == 1
    code.edit(10)
    report = reload_code([str(code.folder)], procs=[procs])
    assert code.helper in report.modules
    assert "kids" in report.meshes
    assert parent.add.call_one().get(20) == 11


def test_names_imported_into_the_main_module_follow(code, procs, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "Imported", code.module.Counter, raising=False)
    code.edit(10, TWICE)
    reload_code([str(code.folder)], procs=[])
    assert hasattr(sys.modules["__main__"].Imported, "twice")


def test_a_slice_a_reference_and_conda_are_refused(code):
    hosts = this_host()
    with pytest.raises(RuntimeError, match="not a slice or a reference"):
        asyncio.run(pickle.loads(pickle.dumps(two_hosts())).sync_workspace(code.folder))
    with pytest.raises(RuntimeError, match="not a slice or a reference"):
        asyncio.run(two_hosts().slice(hosts=0).sync_workspace(code.folder))
    with pytest.raises(NotImplementedError, match="conda=True"):
        asyncio.run(hosts.sync_workspace(code.folder, conda=True))
    with pytest.raises(NotADirectoryError):
        asyncio.run(hosts.sync_workspace(code.folder / "nothing"))
    for wrong in (None, [code.folder, 3]):
        with pytest.raises(TypeError, match="sync_workspace takes a folder, several, or an object with `dirs`, not "):
            asyncio.run(hosts.sync_workspace(wrong))


def two_hosts():
    from monarch_nb.actor import local_hosts

    if not hasattr(two_hosts, "hosts"):
        two_hosts.hosts = local_hosts(2)
    return two_hosts.hosts


@pytest.mark.slow
def test_a_host_without_our_files_gets_a_copy_of_what_differs(tmp_path, code):
    key = tmp_path / ".key"
    Keys.load_or_create(key)
    with user_hosts(tmp_path, 1, key=key) as [host]:
        hosts = attach_hosts([host.endpoint], key=key)
        (code.folder / "data").mkdir()
        (code.folder / "data" / "words.txt").write_text("one")
        (code.folder / "__pycache__").mkdir(exist_ok=True)
        asyncio.run(hosts.sync_workspace(code.folder, auto_reload=True))
        procs = hosts.spawn_procs(per_host={"gpus": 1}, name="far")
        try:
            path = procs.run(file_of, code.model).get(20).item(hosts=0, gpus=0)
            assert path.startswith(str(host.run_folder))
            assert os.path.exists(os.path.join(os.path.dirname(path), "data", "words.txt"))
            counters = procs.spawn("counters", code.module.Counter)
            assert counters.add.call(1).get(20).values() == [1]
            code.edit(10, TWICE)
            (code.folder / "data" / "words.txt").unlink()
            asyncio.run(hosts.sync_workspace(code.folder, auto_reload=True))
            assert counters.add.call(1).get(20).values() == [11]
            assert counters.twice.call().get(20).values() == [22]
            assert not os.path.exists(os.path.join(os.path.dirname(path), "data", "words.txt"))
        finally:
            procs.stop().get(20)


def file_of(module: str) -> str:
    return str(importlib.import_module(module).__file__)


def test_installed_packages_count_as_nobodys_code():
    local = modules.local_modules()
    assert "pytest" not in local
    assert "os" not in local
    assert not [name for name in local if name.startswith("monarch_nb")]
    assert textwrap.__name__ not in local
