"""Decoders of structs: many threads may meet a struct at once."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from monarch_nb._parsing import parsed

ROOT = Path(__file__).parents[2]
MAKERS = {"Decoder", "decode", "convert"}

THREADS = """
import sys, threading
import msgspec
from monarch_nb.wire import converted, json_decoder, msgpack_decoder

sys.setswitchinterval(1e-6)
for number in range(150):
    inner = msgspec.defstruct(f"Inner{number}", [("a", int), ("b", list[int]), ("c", dict[str, int])])
    outer = msgspec.defstruct(f"Outer{number}", [("one", inner), ("many", list[inner])])
    value = outer(inner(1, [2], {"x": 3}), [inner(4, [], {})])
    packed, text, plain = msgspec.msgpack.encode(value), msgspec.json.encode(value), msgspec.to_builtins(value)
    ways = [lambda: msgpack_decoder(outer).decode(packed), lambda: json_decoder(outer).decode(text),
            lambda: converted(plain, outer), lambda: msgpack_decoder(outer).decode(packed)]
    ready, results = threading.Barrier(len(ways)), []
    def run(way):
        ready.wait()
        results.append(way())
    threads = [threading.Thread(target=run, args=(way,)) for way in ways]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    assert results == [value] * len(ways)
"""


@pytest.mark.timeout(60)
def test_threads_that_meet_a_struct_at_once_all_decode_it() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def _typed(call: ast.Call) -> bool:
    """Whether it is a call of msgspec itself with a type."""
    name = call.func
    if not isinstance(name, ast.Attribute) or name.attr not in MAKERS or not ast.unparse(name).startswith("msgspec."):
        return False
    return name.attr != "decode" or any(keyword.arg == "type" for keyword in call.keywords)


@pytest.mark.sources
@pytest.mark.slow
def test_structs_are_decoded_by_nothing_else() -> None:
    sources = [path for folder in ("monarch_nb", "kernel_ext") for path in (ROOT / folder).rglob("*.py")]
    locations = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in sources
        if path != ROOT / "monarch_nb" / "wire" / "plain.py"
        for call in ast.walk(parsed(path.read_text()))
        if isinstance(call, ast.Call) and _typed(call)
    ]
    assert len(sources) > 500
    assert not locations
