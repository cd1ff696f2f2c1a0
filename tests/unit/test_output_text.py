"""Lines out of bytes, and ranks as people write them."""

import pytest

from monarch_nb.logs.lines import Written, briefly
from monarch_nb.logs.overwriting import UP, overwritten
from monarch_nb.logs.receiver import LineBuffer, ProcessLog
from monarch_nb.logs.verbs import LogBlock, LogChunk
from monarch_nb.shape import Extent
from monarch_nb.shape.places import places, places_of, spans


class Log:
    """Bytes that arrive from one process, and the lines made of them."""

    def __init__(self, limit: int = 1000) -> None:
        self.log = ProcessLog("h/p1.0.0", limit, lambda _: "claimed")

    def written(self, data: bytes, *, offset: int | None = None, stream: int = 1, call: str = "c:1") -> list[Written]:
        offset = self.log.received if offset is None else offset
        block = LogBlock(stream, 0, 1.0, call, data)
        return self.log.feed(LogChunk("h/p1.0.0", offset, offset, (block,)), 0.0)

    def feed(self, data: bytes, *, offset: int | None = None, stream: int = 1, call: str = "c:1") -> list[str]:
        blocks = self.written(data, offset=offset, stream=stream, call=call)
        return [line for block in blocks for line in block.lines]

    @property
    def open(self) -> str:
        return "".join(line.text for line in self.log.open_lines(0.0))


def test_lines_are_whole_however_the_bytes_come() -> None:
    text = "eins\nzwei äöü\r\ndrei\n".encode()
    for size in range(1, len(text) + 1):
        log = Log()
        lines = [line for start in range(0, len(text), size) for line in log.feed(text[start : start + size])]
        assert lines == ["eins", "zwei äöü", "drei"]
        assert log.log.received == len(text)


def test_bytes_that_come_twice_are_taken_once() -> None:
    log = Log()
    assert log.feed(b"one\ntw", offset=0) == ["one"]
    assert log.feed(b"one\ntwo\n", offset=0) == ["two"]
    assert log.feed(b"e\n", offset=2) == []
    assert "".join(block.text for block in log.log.written()) == "one\ntwo\n"


def test_following_may_begin_in_the_middle() -> None:
    log = Log()
    assert log.feed(b"later\n", offset=1000) == ["later"]
    assert log.log.received == 1006


def test_of_a_progress_bar_its_last_state_remains() -> None:
    assert overwritten("1%\r2%\r3%") == "3%"
    assert overwritten("done\r") == "done"
    log = Log()
    for percent in range(100_000):
        assert log.feed(f"\r{percent}".encode()) == []
    assert len(log.open) < 200_000
    assert log.feed(b"\n") == [], "a bar may come below it"
    assert log.open == "99999"
    assert log.feed(b"next\n") == ["99999", "next"]


def test_a_line_without_end_does_not_eat_the_memory() -> None:
    log = Log()
    shown = [line for _ in range(50) for line in log.feed(b"x" * 10_000)]
    assert sum(map(len, shown)) + len(log.open) == 500_000
    assert len(log.open) <= 100_000


def test_an_open_line_can_be_cut() -> None:
    log = Log()
    log.feed(b"no end")
    written = log.log.cut("stdout", "c:1")
    assert written is not None
    assert written.text == "no end\n"
    assert log.log.cut("stdout", "c:1") is None


def test_lines_of_streams_and_calls_do_not_run_into_each_other() -> None:
    log = Log()
    for stream, call, text in ((1, "a", b"one "), (2, "a", b"two "), (1, "b", b"three ")):
        assert log.feed(text, stream=stream, call=call) == []
    blocks = [log.written(b"end\n", stream=stream, call=call) for stream, call in ((1, "a"), (2, "a"), (1, "b"))]
    assert [(block.stream, block.call, block.text) for (block,) in blocks] == [
        ("stdout", "a", "one end\n"),
        ("stderr", "a", "two end\n"),
        ("stdout", "b", "three end\n"),
    ]


def test_unattributed_output_is_claimed_or_continues_its_stream() -> None:
    log = Log()
    assert [block.call for block in log.written(b"from C\n", call="?")] == ["claimed"]
    assert log.feed(b"begun ", call="a") == []
    assert [(block.call, block.text) for block in log.written(b"ended\n", call="")] == [("a", "begun ended\n")]


def test_only_the_last_lines_are_kept() -> None:
    log = Log(limit=100)
    for number in range(1000):
        log.feed(b"line %d\n" % number)
    assert len(log.log.written()) == 100
    assert log.log.written()[-1].text == "line 999\n"


def test_ranks_are_drawn_together_along_their_dimensions() -> None:
    assert spans([3, 1, 2, 7]) == "1-3,7"
    grid = [(host, gpu) for host in range(2) for gpu in range(4)]
    assert places(("hosts", "gpus"), grid) == "hosts=0-1 gpus=0-3"
    assert places(("hosts", "gpus"), grid[:-1]) == "hosts=0 gpus=0-3; hosts=1 gpus=0-2"
    assert places((), [()]) == ""
    assert places(("hosts", "gpus"), grid[:4], (1, 4)) == "gpus=0-3", "one host tells nobody apart"
    assert places(("hosts", "gpus"), [(0, 0)], (1, 1)) == "gpus=0"
    assert places_of(Extent(["hosts", "gpus"], [2, 4]).region, [0, 2, 3, 7]) == "hosts=0 gpus=0,2-3; hosts=1 gpus=3"


def test_bars_below_a_bar_leave_no_trail() -> None:
    """As tqdm writes them: a line down, the inner bar, a line up again."""
    steps = "".join(f"\n\r  step {step}{UP}" for step in range(20))
    cleared = f"\n\r{' ' * 9}\r{UP}"
    text = "".join(f"\repoch {epoch}{steps}{cleared}" for epoch in range(3)) + "\repoch 3\ndone\n\nafter\n"
    for size in (1, 2, 7, len(text)):
        log = Log()
        lines = [line for start in range(0, len(text), size) for line in log.feed(text[start : start + size].encode())]
        assert lines == ["epoch 3", "done", "", "after"]
        assert not log.log.open_lines(0.0)


def test_all_bars_are_to_be_seen_while_they_run() -> None:
    log = Log()
    log.feed(f"\repoch 1\n\r  step 7{UP}".encode())
    assert log.open == "epoch 1\n  step 7"
    log.feed(f"\repoch 2\n\r       \r{UP}".encode())
    assert log.open == "epoch 2"


def test_bars_one_after_the_other_stay() -> None:
    log = Log()
    assert log.feed(b"\rone 1\rone 2\n\rtwo 1") == []
    assert log.feed(b"\rtwo 2") == ["one 2"]
    assert log.feed(b"\n\rthree 1\n\rfour 1\n") == ["two 2", "three 1"]
    assert log.open == "four 1"


def test_text_printed_beside_bars_is_a_line_of_its_own() -> None:
    log = Log()
    assert log.feed(f"\repoch 1\n\r step 1{UP}hello\n\n\r step 2{UP}".encode()) == ["hello"]
    assert log.open == "epoch 1\n step 2"
    cleared = f"\n\r       \r{UP}\r        \r"  # as tqdm.write does
    drawn = f"\repoch 1\n\r step 3{UP}"
    assert log.feed(f"{cleared}written\n{drawn}\repoch 2".encode()) == ["written"]
    assert log.open == "epoch 2\n step 3"


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_rows_drawn_while_the_cursor_is_hidden_leave_no_trail(size: int) -> None:
    """As rich draws its bars, and the lines that a program prints meanwhile."""
    up = "\r\x1b[2K\x1b[1A\x1b[2K"
    drawn = [f"\x1b[35mepoch {number}\x1b[0m\nloss {9 - number}" for number in range(3)]
    text = f"before\n\x1b[?25l{drawn[0]}{up}{drawn[1]}{up}hello\n{drawn[1]}{up}{drawn[2]}\n\x1b[?25hafter\n"
    buffer = LineBuffer()
    data = text.encode()
    output = "".join(buffer.feed(data[start : start + size], 0, 0.0, 0.0) for start in range(0, len(data), size))
    assert output == "before\nhello\n\x1b[35mepoch 2\x1b[0m\nloss 7\nafter\n"
    assert buffer.over
    buffer.feed(f"\x1b[?25l{drawn[0]}{up}{drawn[1]}".encode(), 0, 0.0, 0.0)
    assert (buffer.shown, buffer.overwrites) == ("\x1b[35mepoch 1\x1b[0m\nloss 8", True)


def test_two_bars_below_a_bar_leave_no_trail_either() -> None:
    log = Log()
    drawn = "".join(f"\n\r middle {n}{UP}\n\n\r inner {n}{UP}{UP}" for n in range(9))
    assert log.feed(f"\router 0{drawn}\router 1\nend\n".encode()) == ["outer 1", "end"]


def test_records_of_an_actors_ranks_are_equal_but_for_the_rank() -> None:
    def record(rank: int, level: int = 30) -> Written:
        actor = f"[actor=<root>.<__main__.Outer o{{'gpus': 0/2}}>.<__main__.T t{{'gpus': {rank}/2}}>]"
        return Written("h/p.0.0", "stderr", "c:1", level, 1.0, f"WARNING:T:{actor} careful\n{actor} again\n")

    assert briefly(record(0)).text == briefly(record(1)).text == "WARNING:T:[t] careful\n[t] again\n"
    assert briefly(record(0, level=0)) == record(0, level=0)  # it was printed


def test_lines_keep_colours_and_no_other_commands_to_a_terminal() -> None:
    log = Log()
    assert log.feed(b"\x1b[32mgreen\x1b[0m\tA\x1b[2J\x1b]0;title\x07B\n") == ["\x1b[32mgreen\x1b[0m\tAB"]
    assert log.feed("\x9b2Jäö\x85\n".encode()) == ["äö\\x85"]
    log.feed(b"open\x1b]0;")
    assert log.open == "open\\x1b]0;"
    assert log.feed(b"title\x07ends\n") == ["openends"]
