import os
import queue
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from monarch_nb.routing.actions import LinkConfig
from monarch_nb.transport import AGAIN_S, interrupt_program, take_back, throw_into
from monarch_nb.transport.interrupts import held_back, inside, uninterrupted
from tests.unit.transport_tools import End, ends, run_folder

pytestmark = pytest.mark.timeout(120)


def throw_when_allowed(thread: threading.Thread) -> None:
    while not throw_into(thread.ident or 0, KeyboardInterrupt):
        time.sleep(AGAIN_S)


@pytest.fixture
def default_handler() -> object:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def press_in_the_middle(log: list[str], signum: int = signal.SIGINT) -> None:
    log.append("before")
    os.kill(os.getpid(), signum)
    for _ in range(1000):  # time for the interpreter to run the handler
        pass
    log.append("after")


@pytest.mark.usefixtures("default_handler")
def test_ctrl_c_in_a_section_comes_after_it() -> None:
    log: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        uninterrupted(press_in_the_middle, log)
    assert log == ["before", "after"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("default_handler")
def test_deferred_ctrl_c_comes_after_all_nested_sections() -> None:
    log: list[str] = []

    def several() -> None:
        uninterrupted(press_in_the_middle, log)
        assert not inside()  # it may send
        held_back(press_in_the_middle, log)

    with pytest.raises(KeyboardInterrupt):
        held_back(several)
    assert log == ["before", "after"] * 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("section", [held_back, uninterrupted])
def test_an_exception_thrown_into_a_thread_waits_for_its_section(section: Callable[..., object]) -> None:
    begun, thrown = threading.Event(), threading.Event()
    log: list[str] = []

    def body() -> None:
        begun.set()
        assert not thrown.wait(0.1)  # the thrower waits for us
        log.append("whole")

    def run() -> None:
        try:
            section(body)
            while True:
                pass
        except KeyboardInterrupt:
            log.append("interrupted")

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    throw_when_allowed(thread)
    thrown.set()
    thread.join()
    assert log == ["whole", "interrupted"]


@pytest.mark.usefixtures("default_handler")
def test_the_handler_installed_last_is_called_once() -> None:
    uninterrupted(lambda: None)
    calls: list[int] = []

    def own(signum: int, frame: FrameType | None) -> None:
        calls.append(signum)

    signal.signal(signal.SIGINT, own)
    log: list[str] = []

    def twice() -> None:
        press_in_the_middle(log)
        press_in_the_middle(log)
        assert calls == []

    uninterrupted(twice)
    assert calls == [signal.SIGINT]
    assert signal.getsignal(signal.SIGINT) is own


@pytest.mark.usefixtures("default_handler")
@pytest.mark.parametrize("section", [held_back, uninterrupted])
def test_a_handler_of_another_signal_runs_after_the_section(section: Callable[..., object]) -> None:
    log: list[str] = []

    def end_time(signum: int, frame: FrameType | None) -> None:
        log.append("handler")
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, end_time)
    try:
        with pytest.raises(TimeoutError):
            section(press_in_the_middle, log, signal.SIGALRM)
        assert log == ["before", "after", "handler"]
        with pytest.raises(TimeoutError):
            press_in_the_middle(log, signal.SIGALRM)  # outside of sections it runs at once
        assert log[3:] == ["before", "handler"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGALRM, before)


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        uninterrupted(press_in_the_middle, [])
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("default_handler")
def test_an_error_in_the_section_comes_through() -> None:
    with pytest.raises(ZeroDivisionError):
        uninterrupted(lambda: 1 / 0)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def traced_call_ends() -> bool:
    """A traced thread can call a function within ten seconds."""
    done = threading.Event()

    def traced() -> None:
        sys.settrace(lambda frame, event, arg: None)
        (lambda: 1)()
        sys.settrace(None)
        done.set()

    threading.Thread(target=traced, daemon=True).start()
    return done.wait(10)


def test_throwing_into_a_blocked_thread_stalls_no_traced_thread() -> None:
    lock, raised = threading.Lock(), threading.Event()
    lock.acquire()

    def blocked() -> None:
        try:
            lock.acquire()
            while True:
                pass
        except KeyboardInterrupt:
            raised.set()

    thread = threading.Thread(target=blocked, daemon=True)
    thread.start()
    throw_when_allowed(thread)
    assert traced_call_ends()
    lock.release()
    assert raised.wait(10), "it is raised as soon as the thread runs Python again"
    thread.join(10)


def test_a_withdrawn_exception_stalls_no_traced_thread() -> None:
    thread = threading.Thread(target=take_back)
    thread.start()
    thread.join(10)
    assert traced_call_ends()


def test_ctrl_c_ends_the_wait_for_credits_and_sends_nothing() -> None:
    config = LinkConfig(window=1 << 10)
    with run_folder() as folder:
        a, b = End("h/a", folder, config=config), End("h/b", folder, consume=False, config=config)
        with ends(a, b):
            a.send("h/b", b"x" * 2000)
            _, parcel = b.inbox.get(timeout=20)
            timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))

            def wait() -> None:
                timer.start()  # inside `pytest.raises`: the signal may come before the wait begins
                a.send("h/b", b"never")

            with pytest.raises(KeyboardInterrupt):
                wait()
            b.node.consumed(parcel)
            a.send("h/b", b"later")
            assert b.get()[1] == [b"later"]
            with pytest.raises(queue.Empty):
                b.inbox.get(timeout=0.2)


SENDER = """
import signal, sys, threading
from pathlib import Path
from monarch_nb.transport import Node
from monarch_nb.wire.header import Header, Kind

node = Node("h/a", run_folders={"h": Path(sys.argv[1])}, handler=lambda *_: None, on_link_failed=lambda *_: None)
node.start()
style, count = sys.argv[2], int(sys.argv[3])
interrupted = 0
number = 0
armed = False
sent = []


def interrupt(signum, frame):
    global armed
    if armed:  # never outside the try below
        armed = False
        raise KeyboardInterrupt


signal.signal(signal.SIGINT, interrupt)
print("ready", flush=True)
while interrupted < count:
    number += 1
    if style == "swapped" and number % 50 == 0:  # what ipykernel and users do between cells
        signal.signal(signal.SIGINT, lambda *a: interrupt(*a))
    body = b"%d" % number
    try:
        armed = True
        node.send(Header(Kind.CALL, "h/b", "h/a", index=number), node.snapshot([body, body * 3, body * 7]))
        armed = False
        sent.append(number)
    except KeyboardInterrupt:
        interrupted += 1
signal.signal(signal.SIGINT, signal.SIG_IGN)
node.send(Header(Kind.CALL, "h/b", "h/a", index=-1), node.snapshot([b"%d" % interrupted]))
node.close(20)
print(*sent, flush=True)
"""


@pytest.mark.parametrize(
    ("style", "count"), [("default", 200), ("swapped", 200), pytest.param("default", 1000, marks=pytest.mark.slow)]
)
def test_repeated_ctrl_c_while_sending_cuts_and_loses_no_message(style: str, count: int, tmp_path: Path) -> None:
    script = tmp_path / "sender.py"
    script.write_text(SENDER)
    with run_folder() as folder:
        b = End("h/b", folder)
        with ends(b):
            child = subprocess.Popen(
                [sys.executable, str(script), str(folder), style, str(count)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.getcwd()},
            )
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
            arrived: list[int] = []

            def press() -> None:
                while child.poll() is None:
                    child.send_signal(signal.SIGINT)
                    time.sleep(0.0005)

            presser = threading.Thread(target=press)
            presser.start()
            while True:
                header, frames = b.get(timeout=60)
                if header.index == -1:
                    break
                body = b"%d" % header.index
                assert [bytes(frame) for frame in frames] == [body, body * 3, body * 7]
                arrived.append(header.index)
            output, errors = child.communicate(timeout=60)
            presser.join()
            assert child.returncode == 0, errors.decode()
            returned = {int(number) for number in output.split()}
            assert arrived == sorted(set(arrived))  # in order, none twice
            assert returned <= set(arrived)  # none that send() accepted is lost
            assert len(arrived) >= count / 10


LIBRARY = """
import weakref

on = 0
class Key: pass
table = weakref.WeakKeyDictionary()

class mode:
    def __enter__(self):
        global on
        for _ in range(20):
            on += 1
            on -= 1
        on += 1
    def __exit__(self, *error):
        global on
        for _ in range(20):
            on += 1
            on -= 1
        on -= 1

def operation():
    for _ in range(3):
        with mode():
            table[Key()] = 1
"""


@pytest.fixture
def library() -> types.ModuleType:
    """A module of PyTorch's that enters and leaves a mode of the whole process."""
    module = types.ModuleType("torch.distributed.tensor._imitation")
    exec(LIBRARY, vars(module))
    return module


THROWN = 10  # times


def works(library: types.ModuleType) -> None:
    """A program that is in the library most of the time."""
    while True:
        library.operation()
        for _ in range(100):
            pass


def test_thrown_exceptions_never_cut_code_that_leaves_a_mode(library: types.ModuleType) -> None:
    modes = queue.SimpleQueue[int]()

    def program() -> None:
        for _ in range(THROWN):
            try:
                works(library)
            except KeyboardInterrupt:
                modes.put(library.on)

    thread = threading.Thread(target=program, daemon=True)
    thread.start()
    for _ in range(THROWN):
        throw_when_allowed(thread)
        assert modes.get(timeout=30) == 0
    thread.join(30)


@pytest.mark.usefixtures("default_handler")
def test_signals_never_cut_code_that_leaves_a_mode_but_come_soon(library: types.ModuleType) -> None:
    signal.signal(signal.SIGINT, interrupt_program)
    main = threading.main_thread().ident or 0

    def is_interrupted() -> None:
        threading.Timer(0.0005, signal.pthread_kill, (main, signal.SIGINT)).start()
        works(library)

    for _ in range(THROWN * 2):
        with pytest.raises(KeyboardInterrupt):
            is_interrupted()
        assert library.on == 0


def test_a_thread_that_stays_in_such_code_is_not_interrupted(library: types.ModuleType) -> None:
    blocked, inside = threading.Event(), threading.Event()
    vars(library).update(wait=blocked.wait, inside=inside.set)
    exec("def stays():\n    inside()\n    wait()", vars(library))
    thread = threading.Thread(target=library.stays, daemon=True)
    thread.start()
    assert inside.wait(20)
    assert not throw_into(thread.ident or 0, KeyboardInterrupt)
    blocked.set()
    thread.join(20)
    assert not throw_into(thread.ident or 0, KeyboardInterrupt), "it has ended"
