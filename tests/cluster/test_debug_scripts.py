"""Breakpoints in scripts that have not loaded the debugger; a stop may come after a wait has begun."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.fault_tools import ROOT, SOON

pytestmark = pytest.mark.timeout(120)

PROMPT = re.compile(rb"mdb trainers\[gpus=[^\]]+\]> ")

ACTORS = """
import asyncio, sys, threading, time
from monarch.actor import Actor, endpoint, this_host

class Trainer(Actor):
    @endpoint
    def step(self, go):
        while not open(go).read():  # till the script waits
            time.sleep(0.01)
        loss = 7
        breakpoint()
        return loss
"""

WAITS = """
from monarch import debug
from monarch.exceptions import StoppedAtBreakpoint

def getting(future):
    return future.get()

def awaiting(future):
    async def main():
        return await future
    return asyncio.run(main())

def aside(future):
    results = []
    def get():
        try:
            results.append(future.get())
        except BaseException as error:
            results.append(error)
    thread = threading.Thread(target=get)
    thread.start()
    thread.join()
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]

if __name__ == "__main__":
    trainers = this_host().spawn_procs(per_host={"gpus": 2}).spawn("trainers", Trainer)
    for wait in (getting, awaiting, aside):
        open(sys.argv[1], "w").close()
        future = trainers.step.call(sys.argv[1])
        threading.Timer(0.3, lambda: print("go", file=open(sys.argv[1], "w", buffering=1))).start()
        try:
            wait(future)
        except StoppedAtBreakpoint as error:
            assert "trainers gpus=0-1 stopped in the debugger" in str(error), error
            assert "debug.resume()" in str(error), error
        else:
            raise AssertionError(wait)
        debug.resume()
        print(wait.__name__, future.get(20).values(), flush=True)
"""

ASKS = """
if __name__ == "__main__":
    trainers = this_host().spawn_procs(per_host={"gpus": 2}).spawn("trainers", Trainer)
    open(sys.argv[1], "w").close()
    future = trainers.step.call(sys.argv[1])
    threading.Timer(0.3, lambda: print("go", file=open(sys.argv[1], "w", buffering=1))).start()
    print("ended with", future.get().values(), flush=True)
"""


def command(tmp_path: Path, text: str) -> tuple[list[str], dict[str, str]]:
    script = tmp_path / "script.py"
    script.write_text(ACTORS + text)
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT}/kernel_ext", "TERM": "dumb"}
    return [sys.executable, str(script), str(tmp_path / "go")], env


@pytest.mark.slow
def test_a_waiting_script_reports_a_later_stop_and_does_not_hang(tmp_path: Path) -> None:
    line, env = command(tmp_path, WAITS)
    done = subprocess.run(line, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    expected = "getting [7, 7]\nawaiting [7, 7]\naside [7, 7]\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


def test_scripts_at_a_terminal_open_the_prompt_for_later_stops(tmp_path: Path) -> None:
    line, env = command(tmp_path, ASKS)
    terminal, child_end = pty.openpty()
    with subprocess.Popen(line, env=env, stdin=child_end, stdout=child_end, stderr=child_end) as process:
        os.close(child_end)
        try:
            output, answers = b"", 0
            while b"ended with [7, 7]" not in output:
                output += os.read(terminal, 4096)
                if len(PROMPT.findall(output)) > answers:  # one prompt or two: the ranks need not stop at one moment
                    os.write(terminal, b"c all\n" if answers else b"p loss\n")
                    answers += 1
            assert process.wait(SOON) == 0
        finally:
            process.kill()
            os.close(terminal)
    match = re.search(rb"p loss\r\n(.*?)mdb ", output, re.DOTALL)
    assert match is not None, output
    assert b"7" in match[1], output
