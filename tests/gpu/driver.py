"""All that the driver of pretence assumes of the real one (monarch_nb/gpu/pretence.py, ASSUMPTIONS)."""

import ctypes
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from tests.gpu import NotTried, fact, need_gpu

_MB = 1 << 20
_SYS_PIDFD_GETFD = 438  # the same on all architectures
_ANSWER_S = 30.0


def _driver() -> Any:
    need_gpu()
    import torch

    from monarch_nb.gpu import driver

    torch.cuda.init()
    instance = driver()
    if instance is None:
        raise NotTried("cuda-bindings cannot be imported, or libcuda is not there")
    assert instance.name == "cuda", instance.name
    return instance


def _bytes(driver: Any, address: int, size: int) -> bytes:
    room = ctypes.create_string_buffer(size)
    driver.copy(ctypes.addressof(room), address, size, device=0)
    return room.raw


def _fill(driver: Any, address: int, data: bytes) -> None:
    room = ctypes.create_string_buffer(data, len(data))
    driver.copy(address, ctypes.addressof(room), len(data), device=0)


@contextmanager
def _process(function: Callable[..., None], *args: object) -> Iterator[tuple[Any, Connection]]:
    """A process of its own that runs `function(connection, *args)`."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe()
    process = context.Process(target=function, args=(sender, *args), daemon=True)
    process.start()
    sender.close()
    try:
        yield process, receiver
    finally:
        process.kill()
        process.join()


def _receive(connection: Connection) -> Any:
    assert connection.poll(_ANSWER_S), "the other process did not answer"
    answer = connection.recv()
    if isinstance(answer, Exception):
        raise answer
    return answer


def _descriptor_of(pid: int, descriptor: int) -> int:
    pidfd = os.pidfd_open(pid)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        fd = libc.syscall(_SYS_PIDFD_GETFD, pidfd, descriptor, 0)
        if fd < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return int(fd)
    finally:
        os.close(pidfd)


def _makes(connection: Connection, size: int, text: bytes) -> None:
    try:
        driver = _driver()
        descriptor, rounded = driver.create(size, 0)
        address = driver.map(descriptor, rounded, 0)
        _fill(driver, address, text)
        connection.send((os.getpid(), descriptor, rounded))
    except Exception as error:
        connection.send(error)
    connection.recv()


def a_descriptor_outlives_its_process() -> str:
    """A descriptor of create() travels by pidfd_getfd, and its memory outlives the process that made it"""
    driver = _driver()
    with _process(_makes, 3 * _MB, b"made by another process") as (process, connection):
        pid, number, size = _receive(connection)
        began = time.perf_counter()
        own = _descriptor_of(pid, number)
        process.kill()
        process.join()
        address = driver.map(own, size, 0)
        mapped = time.perf_counter() - began
        data = _bytes(driver, address, 23)
        driver.unmap(address, size)
        os.close(own)
    assert data == b"made by another process", data
    return f"{size / _MB:.0f} MB read after SIGKILL of the maker; fetched and mapped in {mapped * 1e3:.1f} ms"


def proc_fd_does_not_open_it() -> str:
    """A descriptor of create() cannot be opened by its path under /proc, which is why pidfd_getfd is used"""
    driver = _driver()
    descriptor, size = driver.create(_MB, 0)
    try:
        reopened = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
    except OSError as error:
        return f"open: {error.strerror}"
    try:
        driver.map(reopened, size, 0)
    except Exception as error:
        return f"it opens, and cannot be mapped: {error}"
    return "it opens and can be mapped here: pidfd_getfd would not be needed"


def both_sides_see_the_same_memory() -> str:
    """What one process writes to mapped memory, another that maps the same descriptor reads"""
    driver = _driver()
    with _process(_makes, _MB, b"one") as (_, connection):
        pid, number, size = _receive(connection)
        own = _descriptor_of(pid, number)
        first, second = driver.map(own, size, 0), driver.map(own, size, 0)
        _fill(driver, first, b"two")
        data = _bytes(driver, second, 3)
        for address in (first, second):
            driver.unmap(address, size)
        os.close(own)
    assert data == b"two", data
    return "two mappings of one descriptor"


@fact(alone=True)
def memory_that_nobody_holds_is_free_again() -> str:
    """Memory that nobody holds any more is free again, also after a process was killed"""
    driver = _driver()
    size = 2048 * _MB
    before = driver.memory(0)[0]
    with _process(_makes, size, b"x") as (process, connection):
        pid, number, _ = _receive(connection)
        own = _descriptor_of(pid, number)
        process.kill()
        process.join()
        rest = driver.memory(0)[0]
        os.close(own)
        freed = driver.memory(0)[0]
    assert before - rest > size * 0.9, f"the descriptor did not hold the memory: {before:,} {rest:,}"
    assert before - freed < size * 0.5, f"not free again: {before:,} before, {freed:,} after"
    return (
        f"free: {before >> 20:,} MB before, {rest >> 20:,} with the descriptor alone, {freed >> 20:,} after its close"
    )


def create_and_map_are_quick() -> str:
    """What create, map, unmap and close take"""
    driver = _driver()
    texts = []
    for size in (2 * _MB, 64 * _MB, 1024 * _MB):
        spans: list[list[float]] = [[], [], []]
        for _ in range(5):
            marks = [time.perf_counter()]
            descriptor, rounded = driver.create(size, 0)
            marks.append(time.perf_counter())
            address = driver.map(descriptor, rounded, 0)
            marks.append(time.perf_counter())
            driver.unmap(address, rounded)
            os.close(descriptor)
            marks.append(time.perf_counter())
            for span, start, end in zip(spans, marks, marks[1:], strict=False):
                span.append((end - start) * 1e3)
        middle = [sorted(span)[2] for span in spans]
        texts.append(f"{size // _MB} MB: {middle[0]:.2f} + {middle[1]:.2f} + {middle[2]:.2f} ms")
    return "; ".join(texts)


def _lends(connection: Connection) -> None:
    try:
        driver = _driver()
        import torch

        tensor = torch.arange(4 * _MB, dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()
        start, _ = driver.range_of(tensor.data_ptr())
        connection.send((driver.lend(start), tensor.data_ptr() - start))
        while True:
            connection.recv()
            tensor.fill_(7)
            torch.cuda.synchronize()
            connection.send(None)
    except EOFError:
        return
    except Exception as error:
        connection.send(error)


def an_allocation_of_torch_can_be_lent() -> str:
    """An allocation of torch's can be lent, opened by another process, and read and written at an offset"""
    driver = _driver()
    with _process(_lends) as (_, connection):
        handle, offset = _receive(connection)
        began = time.perf_counter()
        address = driver.open(handle, 0)
        opened = time.perf_counter() - began
        before = _bytes(driver, address + offset + 400, 4)
        connection.send(None)
        _receive(connection)
        after = _bytes(driver, address + offset + 400, 4)
        again = driver.open(handle, 0)
        driver.close(again)
        still = _bytes(driver, address + offset + 400, 4)
        driver.close(address)
    assert int.from_bytes(before, "little") == 100, before
    assert int.from_bytes(after, "little") == 7, after
    assert still == after, "an open that is closed closed the other one too"
    same = "the same address" if again == address else "another address"
    return (
        f"{len(handle)} bytes of handle, opened in {opened * 1e3:.2f} ms; opened twice: {same}, each closed by itself"
    )


def a_process_cannot_open_its_own() -> str:
    """An allocation cannot be opened by the process that lends it"""
    driver = _driver()
    import torch

    from monarch_nb.gpu import GpuError

    tensor = torch.ones(_MB, device="cuda")
    start, _ = driver.range_of(tensor.data_ptr())
    try:
        address = driver.open(driver.lend(start), 0)
    except GpuError as error:
        driver.check()
        return str(error)
    raise AssertionError(f"it could, at {address:#x} (the allocation is at {start:#x})")


def an_opened_allocation_after_its_owner_was_killed() -> str:
    """An opened allocation can be read after its owner was killed, or the read is an error: it never hangs"""
    driver = _driver()
    from monarch_nb.gpu import GpuError

    with _process(_lends) as (process, connection):
        handle, offset = _receive(connection)
        address = driver.open(handle, 0)
        process.kill()
        process.join()
        try:
            value = int.from_bytes(_bytes(driver, address + offset + 400, 4), "little")
            text = f"read {value} (100 was there)"
        except GpuError as error:
            text = f"error: {error}"
        driver.check()
        try:
            driver.close(address)
            reopened = driver.open(handle, 0)
            text += f"; the handle of the dead can still be opened ({reopened:#x})"
        except GpuError as error:
            text += f"; its handle no longer opens: {error}"
        driver.check()
    return text


def a_handle_after_the_allocation_was_freed() -> str:
    """A handle does not open an allocation that was made later at the same address"""
    driver = _driver()
    with _process(_frees) as (_, connection):
        handle, same_address, second = _receive(connection)
        from monarch_nb.gpu import GpuError

        try:
            address = driver.open(handle, 0)
        except GpuError as error:
            connection.send(None)
            return f"refused: {error} (the same address was given again: {same_address})"
        data = _bytes(driver, address, 4)
        connection.send(None)
        assert second != handle, "the handles of the old and the new allocation are equal"
        return f"it opens, and reads {data.hex()} (the same address was given again: {same_address}; handles differ)"


def _frees(connection: Connection) -> None:
    try:
        driver = _driver()
        import torch

        tensor = torch.full((64 * _MB,), 1, dtype=torch.uint8, device="cuda")
        first, _ = driver.range_of(tensor.data_ptr())
        handle = driver.lend(first)
        del tensor
        torch.cuda.empty_cache()
        tensor = torch.full((64 * _MB,), 2, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        second, _ = driver.range_of(tensor.data_ptr())
        connection.send((handle, first == second, driver.lend(second)))
    except Exception as error:
        connection.send(error)
    connection.recv()


def expandable_segments_cannot_be_lent() -> str:
    """Memory of expandable segments is refused by lend(), or can be lent as any other"""
    with _process(_lends_expandable) as (_, connection):
        return str(_receive(connection))


def _lends_expandable(connection: Connection) -> None:
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    try:
        driver = _driver()
        import torch

        from monarch_nb.gpu import GpuError

        tensor = torch.ones(64 * _MB, dtype=torch.uint8, device="cuda")
        try:
            start, size = driver.range_of(tensor.data_ptr())
            driver.lend(start)
            connection.send(f"it can be lent ({size >> 20} MB from {start:#x})")
        except GpuError as error:
            driver.check()
            connection.send(f"refused: {error}")
    except Exception as error:
        connection.send(error)


def a_full_device_is_an_error_and_stays_usable() -> str:
    """create() on a full device raises GpuMemoryError, and the device is usable after it"""
    driver = _driver()
    from monarch_nb.gpu import GpuMemoryError

    try:
        driver.create(1 << 40, 0)
    except GpuMemoryError as error:
        text = str(error)
    else:
        raise AssertionError("a TB was given")
    driver.check()
    descriptor, _ = driver.create(_MB, 0)
    os.close(descriptor)
    return text


def a_copy_waits_for_the_stream_it_is_given() -> str:
    """copy() waits for the work of the stream that it is given"""
    driver = _driver()
    import torch

    source = torch.zeros(_MB, dtype=torch.uint8, device="cuda")
    target = torch.zeros(_MB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(int(4e8))  # some tenths of a second
        source.fill_(9)
        began = time.perf_counter()
        driver.copy(target.data_ptr(), source.data_ptr(), _MB, device=0, after=stream.cuda_stream)
        waited = time.perf_counter() - began
    value = int(target.min())
    assert value == 9, f"copied {value} before the stream had written 9"
    return f"waited {waited:.2f} s for the stream"


def a_copy_waits_for_the_default_stream() -> str:
    """copy() waits for the work of torch's default stream, whose number is 0"""
    driver = _driver()
    import torch

    source = torch.zeros(_MB, dtype=torch.uint8, device="cuda")
    target = torch.zeros(_MB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(int(4e8))  # some tenths of a second
    source.fill_(9)
    driver.copy(target.data_ptr(), source.data_ptr(), _MB, device=0, after=driver.current_stream(0))
    value = int(target.min())
    assert value == 9, f"copied {value} before the default stream had written 9"
    return f"stream {driver.current_stream(0)}"


def a_copy_that_is_given_no_stream_does_not_wait() -> str:
    """copy() without a stream does not wait for work that is under way in others (legacy default stream aside)"""
    driver = _driver()
    import torch

    source = torch.ones(_MB, dtype=torch.uint8, device="cuda")
    target = torch.zeros(_MB, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(int(2e9))
    began = time.perf_counter()
    driver.copy(target.data_ptr(), source.data_ptr(), _MB, device=0)
    waited = time.perf_counter() - began
    torch.cuda.synchronize()
    took = time.perf_counter() - began
    assert waited < took / 2, f"waited {waited:.2f} of {took:.2f} s"
    return f"copied in {waited * 1e3:.1f} ms beside a kernel of {took:.2f} s"


def copies_between_pageable_memory_and_the_device() -> str:
    """copy() moves bytes between pageable memory and the device in both directions, any size"""
    driver = _driver()
    import torch

    for size in (1, 4095, 8 * _MB, 8 * _MB + 1, 17 * _MB + 3, 40 * _MB):
        data = torch.randint(0, 255, (size,), dtype=torch.uint8)
        gpu = torch.empty(size, dtype=torch.uint8, device="cuda")
        back = torch.empty(size, dtype=torch.uint8)
        stream = torch.cuda.current_stream().cuda_stream
        driver.copy(gpu.data_ptr(), data.data_ptr(), size, device=0, after=stream)
        driver.copy(back.data_ptr(), gpu.data_ptr(), size, device=0)
        assert torch.equal(back, data), f"{size} bytes differ"
        assert torch.equal(gpu.cpu(), data), f"{size} bytes differ on the device"
    return "1 byte to 40 MB, there and back"


def _gb_per_s(work: Callable[[], None], size: int) -> float:
    work()
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return size / best / 1e9


@fact(alone=True)
def staging_is_quick() -> str:
    """Staged copies of pageable memory, beside torch's own of pinned and of pageable memory"""
    driver = _driver()
    import torch

    size = 256 * _MB
    gpu = torch.empty(size, dtype=torch.uint8, device="cuda")
    plain = torch.zeros(size, dtype=torch.uint8)
    pinned = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    address = gpu.data_ptr()
    sync = torch.cuda.synchronize
    rates = {
        "to pageable": _gb_per_s(lambda: driver.copy(plain.data_ptr(), address, size, device=0), size),
        "to pinned": _gb_per_s(lambda: driver.copy(pinned.data_ptr(), address, size, device=0), size),
        "from pageable": _gb_per_s(lambda: driver.copy(address, plain.data_ptr(), size, device=0), size),
        "from pinned": _gb_per_s(lambda: driver.copy(address, pinned.data_ptr(), size, device=0), size),
        "torch to pageable": _gb_per_s(lambda: (plain.copy_(gpu), sync()), size),  # type: ignore[func-returns-value]
        "torch to pinned": _gb_per_s(lambda: (pinned.copy_(gpu), sync()), size),  # type: ignore[func-returns-value]
        "torch from pageable": _gb_per_s(lambda: (gpu.copy_(plain), sync()), size),  # type: ignore[func-returns-value]
        "memmove": _gb_per_s(lambda: ctypes.memmove(pinned.data_ptr(), plain.data_ptr(), size) and None, size),
    }
    return "GB/s: " + ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items())


def _breaks(connection: Connection) -> None:
    try:
        driver = _driver()
        import torch

        from monarch_nb.gpu import GpuError

        driver.check()
        torch.zeros(4, device="cuda")[torch.tensor([10**9], device="cuda")]
        try:
            torch.cuda.synchronize()
            connection.send("no error")
        except Exception as error:
            text = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        try:
            driver.check()
            connection.send((text, "check() raised nothing", False))
        except GpuError as error:
            connection.send((text, str(error), error.sticky))
    except Exception as error:
        connection.send(error)
    connection.recv()


def an_illegal_access_stays() -> str:
    """After a kernel's failed assertion, check() raises a sticky error, in that process only"""
    driver = _driver()
    with _process(_breaks) as (_, connection):
        text, message, sticky = _receive(connection)
        assert sticky, f"{text}; {message}"
        driver.check()
        descriptor, _ = driver.create(_MB, 0)
        os.close(descriptor)
    return f"torch: {text[:80]}; check(): {message}"


def _counts(connection: Connection) -> None:
    try:
        driver = _driver()
        began = time.perf_counter()
        for _ in range(1000):
            driver.check()
        connection.send((time.perf_counter() - began) / 1000)
    except Exception as error:
        connection.send(error)


def a_check_is_cheap() -> str:
    """What check() costs"""
    with _process(_counts) as (_, connection):
        seconds = _receive(connection)
    return f"{seconds * 1e6:.1f} µs"


def loads() -> str:
    """load() counts what this process has on the device, which is no less than its tensors"""
    import torch

    driver = _driver()
    tensor = torch.ones(64 * _MB, dtype=torch.uint8, device="cuda")
    load = driver.load(0)
    assert tensor.nbytes <= load.used <= load.total, load
    if load.own < 0:
        raise NotTried(f"NVML does not know the processes of this container, or is not there: {load}")
    assert tensor.nbytes <= load.own <= load.used, load
    return f"{load.own // _MB} MB of this process, {load.used // _MB} MB of all"
