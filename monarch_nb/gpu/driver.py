"""The functions of a GPU's driver that Monarch-NB needs."""

from typing import TYPE_CHECKING, Protocol

from monarch_nb.gpu.nvml import GpuLoad

if TYPE_CHECKING:
    import torch


class GpuError(RuntimeError):
    """A call of the driver failed. `code` is its number; `sticky` if every later call of this process will fail too."""

    def __init__(self, text: str, code: int = 0, *, sticky: bool = False) -> None:
        super().__init__(text)
        self.code = code
        self.sticky = sticky


class GpuMemoryError(GpuError):
    """The device has no room for an allocation."""


class GpuDriver(Protocol):
    """Memory of the GPUs that this process sees. Addresses are numbers in one space with those of host memory.

    Methods may be called from any thread; each raises GpuError where the driver refuses. Devices are numbered as
    `torch.cuda` numbers them in this process.
    """

    name: str  # "cuda", or "pretence"

    # -- torch's side -------------------------------------------------------------------------------------------------

    def device_of_tensor(self, tensor: "torch.Tensor | torch.UntypedStorage") -> int | None:
        """The device that a torch tensor or storage is on; None for one elsewhere. Makes no call of the driver."""

    def new_storage(self, size: int, device: int) -> "torch.UntypedStorage":
        """Memory of torch's allocator as a `torch.UntypedStorage` of so many bytes.

        Raises torch.OutOfMemoryError.
        """

    def current_stream(self, device: int) -> int:
        """The stream into which torch puts the calling thread's work, as `copy` takes it."""

    def devices(self) -> tuple[int, ...]:
        """The devices, if this process computes on them already; else none. Initialises nothing."""

    # -- addresses ----------------------------------------------------------------------------------------------------

    def device_of(self, address: int) -> int | None:
        """The device whose memory an address lies in; None for memory of the host."""

    def range_of(self, address: int) -> tuple[int, int]:
        """Start and size of the allocation that an address lies in."""

    # -- copies -------------------------------------------------------------------------------------------------------

    def copy(self, target: int, source: int, size: int, *, device: int, after: int = 0) -> None:
        """Copies bytes between any two addresses; blocks until they are there.

        `after` is a stream of `device` (0: none) whose work so far comes first. Memory of the host that is not pinned
        is staged through pinned memory, a piece at a time.
        """

    # -- memory that others lend (torch's allocations): named by a handle, opened by other processes ------------------

    def lend(self, address: int) -> bytes:
        """A handle by which other processes of this host open the allocation that starts at `address`."""

    def open(self, handle: bytes, device: int) -> int:
        """The address, in this process, of an allocation that another process lent. Each `open` needs a `close`."""

    def close(self, address: int) -> None:
        """Ends an `open`."""

    # -- memory of our own: a descriptor names it; it lives as long as a process holds the descriptor or maps it ------

    def create(self, size: int, device: int) -> tuple[int, int]:
        """New memory of at least `size` bytes: a descriptor (close it with os.close) and the bytes that it has.

        Raises GpuMemoryError where the device is full.
        """

    def map(self, descriptor: int, size: int, device: int) -> int:
        """Maps the memory behind a descriptor, of the `size` that `create` returned; returns its address."""

    def unmap(self, address: int, size: int) -> None:
        """Ends a `map`. Work on the memory that is under way must have ended."""

    # -- state --------------------------------------------------------------------------------------------------------

    def identity(self, device: int) -> str:
        """A name of the device that no other device of this machine has, such as its UUID."""

    def memory(self, device: int) -> tuple[int, int]:
        """Free and total bytes."""

    def load(self, device: int) -> GpuLoad:
        """Returns the load of the device and its memory in use. May take milliseconds."""

    def check(self) -> None:
        """Raises the sticky GpuError of this process, if a kernel or copy has left one; else does nothing."""
