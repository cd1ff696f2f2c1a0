"""A controller for a test: a process, in a network namespace if need be, which runs lines of Python."""

import ast
import json
import os
import select
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOON = 60.0


class Console:
    """Starts the process. `before` are the words before its command, such as those that enter a namespace."""

    def __init__(self, folder: Path, *before: str, **env: str) -> None:
        self.log = folder / f"console-{time.monotonic_ns()}.log"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [*before, sys.executable, "-m", "tests.clusters.console"], cwd=ROOT, stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=log, env={**os.environ, **env},
            )  # fmt: skip

    def tell(self, code: str) -> None:
        """Has it run some lines; `answer` returns the result."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(code).encode() + b"\n")
        self.process.stdin.flush()

    def answer(self, within: float = SOON) -> Any:
        """The value of the last line, as JSON has it. Raises RuntimeError with its traceback if it raised."""
        out = self.process.stdout
        assert out is not None
        ready, _, _ = select.select([out], [], [], within)
        if not ready:
            raise TimeoutError(f"no answer within {within:g} s:\n{self.said()}")
        line = out.readline()
        if not line:
            raise EOFError(f"the controller has ended with {self.process.wait()}:\n{self.said()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]

    def ask(self, code: str, within: float = SOON) -> Any:
        """`tell`, then `answer`."""
        self.tell(code)
        return self.answer(within)

    def said(self) -> str:
        """Its printed and logged output."""
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        self.process.kill()
        self._leave()

    def close(self) -> None:
        """It ends as a program does at its last line."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(SOON)
        finally:
            self.kill()

    def _leave(self) -> None:
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def run(code: str, names: dict[str, Any]) -> Any:
    """Runs lines; the value of the last one, if it is an expression."""
    lines = ast.parse(code)
    last = lines.body.pop() if lines.body and isinstance(lines.body[-1], ast.Expr) else None
    exec(compile(lines, "<test>", "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), "<test>", "eval"), names)


def main() -> None:
    """Answers on the former stdout; printed text goes to the log. A mesh that fails does not end it."""
    import monarch_nb.actor

    monarch_nb.actor.unhandled_fault_hook = lambda failure: print(failure.report(), file=sys.stderr)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    names: dict[str, Any] = {}
    for line in sys.stdin:
        try:
            answer = {"value": run(json.loads(line), names)}
            text = json.dumps(answer, default=repr)
        except BaseException as error:
            traceback.print_exc()
            text = json.dumps({"error": f"{type(error).__name__}: {error}"})
        print(text, file=answers, flush=True)


if __name__ == "__main__":
    main()
