"""Code by value, from the `__main__` of one real process to others and back."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PREAMBLE = """\
from monarch_nb.wire import decode, decode_exception, encode
from wire_peer import Peer
peer = Peer()
second = Peer()
"""


@pytest.fixture
def run(tmp_path):
    """Run a program as `__main__`, with two peers at its disposal, and return what it printed."""

    def run_program(source: str, preamble: str = PREAMBLE) -> str:
        program = tmp_path / "program.py"
        program.write_text(preamble + textwrap.dedent(source))
        path = os.pathsep.join([str(HERE.parent.parent), str(HERE), str(tmp_path)])
        done = subprocess.run(
            [sys.executable, "-W", "error::UserWarning", str(program)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=50,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run_program


def test_a_class_keeps_one_identity_in_every_process(run):
    run("""
        class Point:
            made = 0
            def __init__(self, x):
                self.x = x
        point = Point(3)
        first = peer.call(lambda p: id(type(p)), point)
        assert peer.call(lambda p: id(type(p)), point) == first
        assert peer.call(lambda c: id(c), Point) == first
        back = peer.call(lambda p: p, point)
        assert type(back) is Point and back.x == 3
        assert peer.call(lambda c, p: isinstance(p, c), Point, back)
        assert isinstance(peer.call(lambda c: c(5), Point), Point)
    """)


def test_a_class_passed_on_by_a_worker_is_identical_everywhere(run):
    run("""
        class Point:
            pass
        def identity(p):
            return id(type(p)), p
        # what the first worker answers is the very message for the second
        ok, *frames = peer.exchange(encode((lambda f, p: (f, (p,)), (identity, Point()))))
        assert ok == b"1"
        ok, *frames = second.exchange(frames)
        handed, back = decode(frames)
        assert type(back) is Point
        direct, _ = second.call(identity, Point())
        assert direct == handed
    """)


def test_class_attributes_that_a_worker_sets_last_between_messages(run):
    run("""
        class Counter:
            count = 0
            def add(self):
                Counter.count += 1
                return Counter.count
        assert [peer.call(lambda c: c.add(), Counter()) for _ in range(3)] == [1, 2, 3]
        assert Counter.count == 0
    """)


def test_changed_globals_are_seen_and_the_class_object_stays(run):
    run("""
        STEP = 1
        def helper(x):
            return x + STEP
        class Stepper:
            def step(self, x):
                return helper(x)
        stepper = Stepper()
        look = lambda s: (id(type(s)), s.step(10))
        same, result = peer.call(look, stepper)
        assert result == 11
        STEP = 5
        again, result = peer.call(look, stepper)
        assert (again, result) == (same, 15)
        Stepper.extra = 1
        assert peer.call(lambda s: s.extra, stepper) == 1
        del Stepper.extra
        assert not peer.call(lambda s: hasattr(s, "extra"), stepper)
    """)


def test_a_late_older_definition_does_not_undo_a_newer_one(run):
    run("""
        STEP = 1
        class Stepper:
            def step(self):
                return STEP
        look = lambda s: s.step()
        old = encode((look, (Stepper(),)))
        STEP = 2
        assert peer.call(look, Stepper()) == 2
        assert decode(peer.exchange(old)[1:]) == 2
        STEP = 1
        assert peer.call(look, Stepper()) == 1
    """)


def test_changed_dependency_is_seen_through_an_unchanged_class(run):
    run("""
        STEP = 1
        class Inner:
            def step(self):
                return STEP
        class Outer:
            def step(self):
                return Inner().step()
        assert peer.call(lambda o: o.step(), Outer()) == 1
        STEP = 2
        assert peer.call(lambda o: o.step(), Outer()) == 2
    """)


def test_redefined_class_is_a_new_definition(run):
    run("""
        class Thing:
            def name(self): return "old"
        old = Thing()
        class Thing:
            def name(self): return "new"
        new = Thing()
        names, same = peer.call(lambda a, b: ((a.name(), b.name()), type(a) is type(b)), old, new)
        assert names == ("old", "new") and not same
        assert type(peer.call(lambda o: o, old)) is type(old)
    """)


def test_mutually_recursive_classes_and_functions(run):
    run("""
        class Ping:
            def hit(self, n):
                return n if n <= 0 else Pong().hit(n - 1)
        class Pong:
            def hit(self, n):
                return n if n <= 0 else Ping().hit(n - 1)
        def even(n): return True if n == 0 else odd(n - 1)
        def odd(n): return False if n == 0 else even(n - 1)
        assert peer.call(lambda p: p.hit(9), Ping()) == 0
        assert peer.call(even, 10) is True
        ids = peer.call(lambda a, b: (id(a), id(b)), Ping, Pong)
        assert peer.call(lambda a, b: (id(a), id(b)), Ping, Pong) == ids
    """)


def test_inheritance_super_nested_classes_and_class_attributes_that_are_instances(run):
    run("""
        class Base:
            registry = []
            def __init_subclass__(cls, **kwargs):
                super().__init_subclass__(**kwargs)
                cls.tag = cls.__name__.lower()
            def __init__(self, x): self.x = x
            def show(self): return f"base {self.x}"
        class Child(Base):
            class Inner:
                value = 7
            def __init__(self, x):
                super().__init__(x)
                self.inner = Child.Inner()
            def show(self): return "child of " + super().show()
            @classmethod
            def make(cls): return cls(1)
            @staticmethod
            def twice(x): return 2 * x
            @property
            def half(self): return self.x / 2
        Child.default = Child(0)
        c = peer.call(lambda c: c, Child(4))
        assert type(c) is Child and type(c.inner) is Child.Inner
        assert peer.call(lambda c: (c.show(), c.inner.value, c.make().x, c.twice(4), c.half, c.tag), Child(4)) == (
            "child of base 4", 7, 1, 8, 2.0, "child")
        assert peer.call(lambda c, b: issubclass(type(c), b) and isinstance(c.default, type(c)), Child(1), Base)
        assert type(peer.call(lambda c: c.default, Child(1))) is Child
    """)


def test_dataclasses_enums_and_named_tuples(run):
    run("""
        import dataclasses, enum, typing, collections
        @dataclasses.dataclass(frozen=True, order=True)
        class Config:
            name: str
            size: int = 3
            tags: list = dataclasses.field(default_factory=list)
        @dataclasses.dataclass(slots=True)
        class Slotted:
            a: int
            b: int = 2
        class Color(enum.Enum):
            RED = 1
            BLUE = "b"
            def describe(self): return f"the color {self.name}"
        class Level(enum.IntFlag):
            LOW = 1
            HIGH = 2
        class Pair(typing.NamedTuple):
            a: int
            b: str = "x"
            def both(self): return f"{self.a}{self.b}"
        Old = collections.namedtuple("Old", "u v")
        class Options(typing.TypedDict, total=False):
            size: int
        assert peer.call(lambda c: dataclasses.replace(c, size=4), Config("n")) == Config("n", 4)
        assert peer.call(lambda c: [f.name for f in dataclasses.fields(c)], Config("n")) == ["name", "size", "tags"]
        s = peer.call(lambda s: dataclasses.replace(s, b=9), Slotted(1))
        assert s == Slotted(1, 9) and type(s) is Slotted
        assert peer.call(lambda c: (c, c is type(c).RED, c.describe()), Color.RED) == (Color.RED, True, "the color RED")
        assert peer.call(lambda c: c, Color.BLUE) is Color.BLUE
        assert peer.call(lambda l: l, Level.LOW | Level.HIGH) is Level.LOW | Level.HIGH
        p = peer.call(lambda p: p._replace(a=5), Pair(1))
        assert type(p) is Pair and p == (5, "x") and peer.call(lambda p: p.both(), p) == "5x"
        assert type(peer.call(lambda o: o, Old(1, 2))) is Old
        assert peer.call(lambda o: o(size=1), Options) == {"size": 1}
        assert peer.call(lambda: {Color.RED: Config("a")}[Color.RED].name) == "a"
    """)


def test_slots_stay_slots(run):
    run("""
        class Slotted:
            __slots__ = ("a", "__private", "__weakref__")
            def __init__(self):
                self.a = 1
                self.__private = 2
            def private(self): return self.__private
        class Sub(Slotted):
            __slots__ = ("c",)
        def check(s):
            try:
                s.new = 1
            except AttributeError:
                s.a += 1
                return s
        s = peer.call(check, Slotted())
        assert type(s) is Slotted and s.a == 2 and s.private() == 2
        sub = Sub()
        sub.c = 3
        assert peer.call(check, sub).c == 3
        class One:
            __slots__ = "only"
        one = One()
        one.only = 1
        assert peer.call(lambda o: o, one).only == 1
    """)


def test_generics_protocols_abstract_classes_and_metaclasses(run):
    run("""
        import abc, typing
        T = typing.TypeVar("T")
        UserId = typing.NewType("UserId", int)
        class Box(typing.Generic[T]):
            def __init__(self, x: T): self.x = x
        class IntBox(Box[int]):
            owner: UserId = UserId(3)
            def who(self): return UserId(self.owner)
        class Sized(typing.Protocol):
            def size(self) -> int: ...
        class Shape(abc.ABC):
            @abc.abstractmethod
            def area(self): ...
        class Square(Shape):
            def area(self): return 4
        class Alien:
            def size(self): return 1
        Shape.register(Alien)
        class Meta(type):
            def __new__(mcs, name, bases, ns):
                cls = super().__new__(mcs, name, bases, ns)
                cls.made_by = "Meta"
                return cls
            def hello(cls): return f"hello from {cls.__name__}"
        class WithMeta(metaclass=Meta):
            pass
        b = peer.call(lambda b: (b, b.who()), IntBox(1))
        assert type(b[0]) is IntBox and b[1] == 3
        assert peer.call(lambda B: B[str]("x").x, Box) == "x"
        assert peer.call(lambda s, k: (s.area(), isinstance(s, k)), Square(), Shape) == (4, True)
        assert peer.call(lambda a, k: isinstance(a, k), Alien(), Shape)
        def abstract(k):
            try:
                k()
            except TypeError:
                return True
        assert peer.call(abstract, Shape)
        assert peer.call(lambda w: (type(w).hello(), type(w).made_by), WithMeta()) == ("hello from WithMeta", "Meta")
        assert type(peer.call(lambda w: w, WithMeta())) is WithMeta
        assert peer.call(lambda a, P: a.size(), Alien(), Sized) == 1
    """)


def test_closures_lambdas_decorators_caches_partials_and_coroutines(run):
    run("""
        import asyncio, functools
        def make(n):
            class Local:
                def get(self): return n
            return Local, lambda x: x + n
        Local, add = make(4)
        assert peer.call(lambda: (add(1), Local().get())) == (5, 4)
        assert type(peer.call(lambda c: c(), Local)) is Local
        @functools.lru_cache(maxsize=10)
        def square(x): return x * x
        assert peer.call(square, 4) == 16 and peer.call(lambda: square.cache_info().maxsize) == 10
        def traced(f):
            @functools.wraps(f)
            def wrapper(*args): return ("traced", f(*args))
            return wrapper
        @traced
        def cube(x): return x ** 3
        assert peer.call(cube, 2) == ("traced", 8)
        assert peer.call(functools.partial(pow, 2), 5) == 32
        async def later(x): return x + 1
        assert peer.call(lambda x: asyncio.run(later(x)), 1) == 2
        class Lazy:
            @functools.cached_property
            def value(self): return 7
        assert peer.call(lambda l: (l.value, l.value), Lazy()) == (7, 7)
        class Method:
            def go(self, x): return x
        assert peer.call(Method().go, 3) == 3
        fact = lambda n: 1 if n < 2 else n * fact(n - 1)
        assert peer.call(fact, 5) == 120
    """)


def test_module_registered_by_value_needs_not_exist_elsewhere(run, tmp_path):
    folder = tmp_path / "only_here"
    folder.mkdir()
    (folder / "mymod.py").write_text("K = 3\nclass Thing:\n    def k(self):\n        return K\n")
    run(
        """
        import sys
        sys.path.insert(0, "only_here")
        import mymod
        from monarch_nb.wire import register_pickle_by_value, unregister_pickle_by_value
        try:
            peer.call(lambda t: t.k(), mymod.Thing())
        except ModuleNotFoundError:
            pass
        else:
            raise AssertionError
        register_pickle_by_value(mymod)
        assert peer.call(lambda t: t.k(), mymod.Thing()) == 3
        back = peer.call(lambda t: t, mymod.Thing())
        assert type(back) is mymod.Thing
        assert peer.call(lambda: "mymod" in __import__("sys").modules) is False
        unregister_pickle_by_value(mymod)
        import cloudpickle
        cloudpickle.register_pickle_by_value(mymod)
        assert peer.call(lambda t: t.k(), mymod.Thing()) == 3
        """
    )


def test_functions_of_a_namespace_that_is_no_module_travel_by_value(run):
    run("""
        space = {"__name__": "cells.trainers"}
        exec("BASE = 2\\nclass A:\\n    def up(self): return BASE + 1\\ndef f(): return A().up()", space)
        assert peer.call(space["f"]) == 3
        assert type(peer.call(lambda a: a, space["A"]())) is space["A"]
    """)


def test_tracebacks_elsewhere_show_the_lines_of_a_cell(run):
    out = run("""
        import linecache, time
        text = "class Cell:\\n    def go(self):\\n        return 1 / 0  # in the cell\\n"
        name = "/nowhere/ipykernel_123/456.py"
        linecache.cache[name] = (len(text), time.time(), text.splitlines(True), name)
        exec(compile(text, name, "exec"), globals())
        def in_script(c):
            return c.go()  # in the script
        for p in (peer, peer):
            try:
                p.call(in_script, Cell())
            except ZeroDivisionError as error:
                print("".join(error.__monarch_traceback__))
        # a worker that only hands the class on hands its lines on too
        run_it = lambda c: c.go()
        ok, *frames = peer.exchange(encode((lambda f, c: (f, (c,)), (run_it, Cell()))))
        ok, *frames = second.exchange(frames)
        assert ok == b"0"
        print("".join(decode_exception(frames).__monarch_traceback__))
        import inspect
        assert "in the cell" in peer.call(lambda c: inspect.getsource(c.go), Cell())
    """)
    assert out.count("return 1 / 0  # in the cell") == 3
    assert out.count("return c.go()  # in the script") == 2


def test_exceptions_defined_in_main_keep_their_class(run):
    run("""
        class Broken(Exception):
            def __init__(self, code, *, where):
                super().__init__(f"{code} at {where}")
                self.code = code
        def fail():
            raise Broken(3, where="here")
        try:
            peer.call(fail)
        except Broken as error:
            assert error.code == 3 and str(error) == "3 at here"
        else:
            raise AssertionError
    """)


def test_large_captured_global_warns_by_name(run):
    run("""
        import warnings
        data = bytes(12_000_000)
        def f():
            return len(data)
        class Holder:
            def size(self):
                return len(data)
        for thing, name in ((f, "`f`"), (Holder, "`Holder.size`")):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert peer.call(lambda x: 1, thing) == 1
            (warning,) = caught
            assert f"the function {name} captures the global `data` (12 MB)" in str(warning.message)
            assert warning.filename.endswith("wire_peer.py"), warning.filename
    """)


def test_classes_move_both_ways_when_a_worker_defines_one(run):
    run("""
        class Base:
            pass
        def define():
            class Theirs(Base):
                n = 5
            return Theirs()
        mine = peer.call(define)
        assert isinstance(mine, Base) and mine.n == 5
        reply = peer.call(lambda o: (id(type(o)), o), mine)
        assert type(reply[1]) is type(mine)
    """)


def test_same_definition_is_not_executed_again(run):
    run("""
        class Base:
            def __init_subclass__(cls):
                import builtins
                builtins.subclasses_made = getattr(builtins, "subclasses_made", 0) + 1
        class Child(Base):
            def who(self): return Child
        for _ in range(3):
            function = peer.call(lambda c: id(type(c).__dict__["who"]), Child())
        assert peer.call(lambda c: id(type(c).__dict__["who"]), Child()) == function
        assert peer.call(lambda: __import__("builtins").subclasses_made) == 1
    """)


def test_code_and_its_inner_functions_keep_the_file_name(run):
    run("""
        class Trainer:
            def step(self):
                return (lambda: None).__code__.co_filename
        def files():
            return files.__code__.co_filename, (lambda: None).__code__.co_filename
        assert peer.call(files) == (__file__, __file__)
        assert peer.call(lambda t: (t.step.__code__.co_filename, t.step()), Trainer()) == (__file__, __file__)
    """)
