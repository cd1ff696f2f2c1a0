"""How far the output of other processes had come when they last replied, or ended."""

from monarch_nb.wire import parse_address

TO_THE_END = 1 << 62  # the position of a process that has ended: all that it wrote


class LogPositions(dict[str, int]):
    """By address; each reply of a process that keeps its output sets its position. Thread-safe."""

    def ended(self, address: str) -> None:
        """A process has ended: what it wrote last is waited for, too."""
        self[address] = TO_THE_END

    def take(self) -> dict[str, int]:
        """The positions that came since they were taken last."""
        taken: dict[str, int] = {}
        for _ in range(len(self)):
            try:
                address, position = self.popitem()
            except KeyError:  # another thread takes them as well
                break
            taken[address] = max(position, taken.get(address, 0))
        return taken

    def forget(self, uid: str) -> None:
        """Forgets the positions of the processes of a mesh."""
        for address in tuple(self):
            if parse_address(address).mesh == uid:
                self.pop(address, None)
