"""Controllers of the tests of detach, each a process that runs one of `detach_programs`."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).with_name("detach_programs.py")
SOON = 30.0


class Controller:
    def __init__(self, folder: Path, *words: str, **env: str) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAMS), *words], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "GATE": str(folder / "gate"), **env},
        )  # fmt: skip

    def until(self, word: str) -> list[str]:
        """The rest of the next line that begins with this word."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if line.split()[:1] == [word]:
                return line.split()[1:]
        raise AssertionError(f"no line {word!r}: {self.lines}")

    def done(self) -> "Controller":
        assert self.process.stdout is not None
        with self.process.stdout:
            self.lines += [line.rstrip() for line in self.process.stdout]
        assert self.process.wait(SOON) == 0, self.lines
        return self

    def kill(self) -> None:
        assert self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def said(self, word: str) -> list[list[str]]:
        return [line.split()[1:] for line in self.lines if line.split()[:1] == [word]]


def files(folder: Path) -> list[Path]:
    """The records of detached meshes."""
    return list(folder.glob("monarch-nb/meshes/*.json"))


def come_back(folder: Path, first: Controller) -> Controller:
    """Another program attaches the mesh, with its state; its ranks reach each other."""
    assert first.said("counts") == [["15", "15"]]
    assert all(file.stat().st_mode & 0o777 == 0o600 for file in files(folder))
    (folder / "gate").touch()
    second = Controller(folder, "take").done()
    assert second.said("counts") == [["16", "16"]], second.lines
    assert second.said("across") == [["16"]]
    assert second.said("pids") == first.said("pids")
    return second
