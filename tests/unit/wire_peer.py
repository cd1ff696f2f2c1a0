"""A process that runs the functions sent to it, for tests of the wire. `python wire_peer.py` is that process."""

import os
import struct
import subprocess
import sys
from functools import cached_property
from typing import Any, BinaryIO

from monarch_nb.wire import decode, decode_exception, encode, encode_exception


def write_frames(stream: BinaryIO, frames: list[Any]) -> None:
    stream.write(struct.pack("<I", len(frames)))
    for frame in frames:
        view = memoryview(frame).cast("B")
        stream.write(struct.pack("<Q", len(view)))
        stream.write(view)
    stream.flush()


def read_frames(stream: BinaryIO) -> list[Any]:
    frames: list[Any] = []
    for _ in range(struct.unpack("<I", stream.read(4))[0]):
        frames.append(bytearray(stream.read(struct.unpack("<Q", stream.read(8))[0])))
    return frames


class Peer:
    """It starts with the first message to it."""

    @cached_property
    def process(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(os.environ)
        )

    def exchange(self, frames: list[Any]) -> list[Any]:
        """The frames that answer `frames`: those of an encoded (ok, frames of the value)."""
        assert self.process.stdin
        assert self.process.stdout
        write_frames(self.process.stdin, frames)
        return read_frames(self.process.stdout)

    def call(self, function: Any, *args: Any) -> Any:
        ok, *frames = self.exchange(encode((function, args)))
        if ok == b"1":
            return decode(frames)
        raise decode_exception(frames)


def main() -> None:
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            frames = read_frames(sys.stdin.buffer)
        except struct.error:
            return
        try:
            function, args = decode(frames)
            reply = [b"1", *encode(function(*args))]
        except BaseException as error:
            reply = [b"0", *encode_exception(error)]
        write_frames(replies, reply)


if __name__ == "__main__":
    main()
