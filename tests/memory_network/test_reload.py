"""Living actors take over a changed class."""

import sys
import types

import pytest

import monarch_nb.actor
from monarch_nb.actor import Actor, ActorError, SupervisionError, endpoint, heal_mesh, reload_mesh, this_host
from monarch_nb.wire import register_pickle_by_value, unregister_pickle_by_value

pytestmark = pytest.mark.timeout(120)

OLD = """
from monarch_nb.actor import Actor, endpoint

class Counter(Actor):
    def __init__(self):
        self.n = 0

    @endpoint
    def add(self, k):
        self.n += k
        return self.n

    def helper(self):
        return "old"
"""

NEW = (
    OLD.replace("self.n += k", "self.n += 10 * k").replace('"old"', '"new"')
    + """
    @endpoint
    def twice(self):
        return 2 * self.n, self.helper(), self.seen

    def __reload__(self, old):
        self.seen = old.__name__
"""
)


@pytest.fixture
def module():
    new_module = types.ModuleType("reload_me")
    sys.modules["reload_me"] = new_module
    exec(compile(OLD, "reload_me.py", "exec"), new_module.__dict__)
    register_pickle_by_value(new_module)
    yield new_module
    unregister_pickle_by_value(new_module)
    del sys.modules["reload_me"]


@pytest.fixture(scope="module")
def procs():
    mesh = this_host().spawn_procs(per_host={"gpus": 2}, name="reloads")
    yield mesh
    mesh.stop().get(20)


def test_state_stays_and_order_holds(procs, module):
    counters = procs.spawn("counters", module.Counter)
    before = [counters.add.call(1) for _ in range(50)]
    exec(compile(NEW, "reload_me.py", "exec"), module.__dict__)
    done = reload_mesh(counters)
    after = counters.add.call(1)
    done.get(20)
    assert before[-1].get(40).values() == [50, 50]
    assert after.get(40).values() == [60, 60]
    assert counters.twice.call().get(40).values() == [(120, "new", "Counter")] * 2


def test_a_changed_init_is_said(procs, module):
    counters = procs.spawn("counters", module.Counter)
    source = OLD.replace("self.n = 0", "self.n = 5")
    exec(compile(source, "reload_me.py", "exec"), module.__dict__)
    with pytest.warns(UserWarning, match="__init__ has changed"):
        reload_mesh(counters).get(20)


def test_sync_cannot_become_async(procs, module):
    counters = procs.spawn("counters", module.Counter)
    exec(compile(OLD.replace("    def add", "    async def add"), "reload_me.py", "exec"), module.__dict__)
    with pytest.raises(TypeError, match="is async now and was sync"):
        reload_mesh(counters)


class Slotted(Actor):
    __slots__ = ("x",)

    @endpoint
    def get(self):
        return 1


class Wider(Actor):
    __slots__ = ("x", "y")

    @endpoint
    def get(self):
        return 2


def test_changed_slots_are_refused(procs):
    mesh = procs.spawn("slotted", Slotted)
    with pytest.raises(TypeError, match="__slots__ of Wider have changed"):
        reload_mesh(mesh, Wider)
    assert mesh.get.call().get(40).values() == [1, 1]


def test_a_slice_is_refused(procs):
    mesh = procs.spawn("slotted", Slotted)
    with pytest.raises(ValueError, match="not a slice"):
        reload_mesh(mesh.slice(gpus=0))


class Asker(Actor):
    def __init__(self, counters=None):
        self.counters = counters

    @endpoint
    def take(self, counters):
        self.counters = counters

    @endpoint
    def ask(self, name, *args):
        return getattr(self.counters, name).call(*args).get(40).values()


def test_references_in_other_processes_see_new_endpoints(procs, module):
    counters = procs.spawn("counters", module.Counter)
    asker = procs.slice(gpus=0).spawn("asker", Asker)
    asker.take.call_one(counters).get(40)
    assert asker.ask.call_one("add", 1).get(40) == [1, 1]
    source = NEW.replace("def add(self, k)", "def add(self, k, extra=0)")
    exec(compile(source, "reload_me.py", "exec"), module.__dict__)
    reload_mesh(counters).get(20)
    assert asker.ask.call_one("add", 1, 5).get(40) == [11, 11]
    assert asker.ask.call_one("twice").get(40) == [(22, "new", "Counter")] * 2


def test_a_healed_rank_has_the_reloaded_class(module, kill, monkeypatch):
    monkeypatch.setattr(monarch_nb.actor, "unhandled_fault_hook", lambda failure: None)
    procs = this_host().spawn_procs(per_host={"gpus": 2}, name="healed")
    try:
        counters = procs.spawn("counters", module.Counter)
        counters.add.call(1).get(20)
        exec(compile(NEW, "reload_me.py", "exec"), module.__dict__)
        reload_mesh(counters).get(20)
        kill(procs.slice(gpus=1))
        with pytest.raises(SupervisionError):
            [counters.add.call(1).get(20) for _ in range(100)]
        with pytest.raises(SupervisionError):
            reload_mesh(counters)
        heal_mesh(counters)
        assert counters.add.call(1).get(20).get(1) == 10
    finally:
        procs.stop().get(20)


def test_a_hook_that_raises_is_told(procs, module):
    counters = procs.spawn("counters", module.Counter)
    source = NEW.replace("self.seen = old.__name__", "raise ValueError('cannot follow')")
    exec(compile(source, "reload_me.py", "exec"), module.__dict__)
    with pytest.raises(ActorError, match="cannot follow"):
        reload_mesh(counters).get(20)
    assert counters.add.call(1).get(40).values() == [10, 10]
