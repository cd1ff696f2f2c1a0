"""Folders of checkpoints: each is complete or not there, and the newest work stays."""

import shutil
from pathlib import Path

import pytest

from monarch_nb.tensor.checkpoints.workers import attempt, complete, find, finish

pytestmark = pytest.mark.timeout(30)


def save(folder: Path, step: int, text: str, keep: int = 2) -> None:
    written = attempt(str(folder), step, "mark")
    written.mkdir()
    (written / "a shard").write_text(text)
    finish(written, step, text.encode(), keep)


def test_only_whole_checkpoints_remain_if_a_removal_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, "first")
    save(tmp_path, 2, "second")

    def killed(path: Path, **_: object) -> None:
        Path(path, "a shard").unlink(missing_ok=True)
        raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(InterruptedError):
            save(tmp_path, 2, "second again")
        with pytest.raises(InterruptedError):
            save(tmp_path, 3, "third")
    assert complete(str(tmp_path)) == [2, 3]
    assert find(str(tmp_path), 2) == (2, b"second again")
    save(tmp_path, 3, "third again")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


@pytest.mark.parametrize("keep", [1, 2])
def test_a_save_stays_beside_later_steps_of_another_run(tmp_path: Path, keep: int) -> None:
    save(tmp_path, 100, "former run")
    for step in (10, 20):
        save(tmp_path, step, "this run", keep)
    assert complete(str(tmp_path)) == [20, 100][:keep]
