"""Lines out of bytes, and ranks as people write them."""

from monarch_nb.mesh.output import _Log, overwritten
from monarch_nb.mesh.places import places, spans


def test_lines_are_whole_however_the_bytes_come() -> None:
    text = "eins\nzwei äöü\r\ndrei\n".encode()
    for size in range(1, len(text) + 1):
        log = _Log()
        lines = [line for at in range(0, len(text), size) for line in log.feed(at, text[at : at + size])]
        assert lines == ["eins", "zwei äöü", "drei"]
        assert log.position == len(text)


def test_bytes_that_come_twice_are_taken_once() -> None:
    log = _Log()
    assert log.feed(0, b"one\ntw") == ["one"]
    assert log.feed(0, b"one\ntwo\n") == ["two"]
    assert log.feed(2, b"e\n") == []
    assert list(log.lines) == ["one", "two"]


def test_following_may_begin_in_the_middle() -> None:
    log = _Log()
    assert log.feed(1000, b"later\n") == ["later"]
    assert log.position == 1006


def test_of_a_progress_bar_its_last_state_remains() -> None:
    assert overwritten("1%\r2%\r3%") == "3%"
    assert overwritten("done\r") == "done"
    log = _Log()
    for percent in range(100_000):
        assert log.feed(log.position, f"\r{percent}".encode()) == []
    assert len(log.open) < 200_000
    assert log.feed(log.position, b"\n") == ["99999"]


def test_a_line_without_end_does_not_eat_the_memory() -> None:
    log = _Log()
    shown = [line for _ in range(50) for line in log.feed(log.position, b"x" * 10_000)]
    assert sum(map(len, shown)) + len(log.open) == 500_000
    assert len(log.open) <= 100_000


def test_an_open_line_can_be_cut() -> None:
    log = _Log()
    log.feed(0, b"no end")
    assert log.cut() == "no end"
    assert log.cut() == ""
    assert list(log.lines) == ["no end"]


def test_ranks_are_drawn_together_along_their_dimensions() -> None:
    assert spans([3, 1, 2, 7]) == "1-3,7"
    grid = [(host, gpu) for host in range(2) for gpu in range(4)]
    assert places(("hosts", "gpus"), grid) == "hosts=0-1 gpus=0-3"
    assert places(("hosts", "gpus"), grid[:-1]) == "hosts=0 gpus=0-3; hosts=1 gpus=0-2"
    assert places((), [()]) == ""
