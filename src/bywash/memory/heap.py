"""One rank's heap: anonymous shared memory that exists only as long as somebody maps it.

A memfd has no name, so nothing is left behind when a rank is killed, and it is not limited by the size of a mounted
/dev/shm. Its pages are allocated up front and its size is sealed: touching a mapped page can never raise SIGBUS.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from contextlib import suppress
from pathlib import Path

# Python's fcntl has these names only from 3.12 on; the numbers are the kernel's (include/uapi/linux/fcntl.h).
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEAL_SHRINK, _SEAL_GROW = 2, 4

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value


class Heap:
    """A mapping of shared memory, zero when created.

    The mapping lives until the last view of it is gone, so dropping a heap never invalidates rows that somebody
    still holds.

    Attributes:
        buffer: the mapped bytes; numpy and torch make views of it.
    """

    def __init__(self, descriptor: int, heap_bytes: int) -> None:
        """Map a sealed descriptor. The descriptor is not needed afterwards.

        Raises:
            OSError: the descriptor is smaller than it should be, is not sealed, or there is no address space.
        """
        if os.fstat(descriptor).st_size != heap_bytes:
            raise OSError(f"the heap has {os.fstat(descriptor).st_size} bytes, {heap_bytes} were agreed")
        if not fcntl.fcntl(descriptor, _F_GET_SEALS) & _SEAL_SHRINK:
            raise OSError("the heap may shrink under its readers: it is not sealed")
        self.buffer = _map(descriptor, heap_bytes)

    @staticmethod
    def create(heap_bytes: int) -> int:
        """Make shared memory of `heap_bytes` with all its pages, and return its descriptor.

        Raises:
            OSError: the pages cannot be had.
        """
        if heap_bytes > available_bytes():  # the kernel would not refuse: it would kill the largest process
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        descriptor = os.memfd_create("bywash-heap", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(descriptor, 0, heap_bytes)
            fcntl.fcntl(descriptor, _F_ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


def _map(descriptor: int, size: int) -> memoryview:
    """Map `size` bytes until the last view of them is gone.

    Not Python's mmap object, which keeps a duplicate of the descriptor: with many ranks that is hundreds.
    """
    # Populate: page faults belong here, not into the first steps.
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
    if address in (None, _MAP_FAILED):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    memory = (ctypes.c_char * size).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, size).atexit = False  # views may outlive the interpreter's exit
    return memoryview(memory).cast("B")


def available_bytes() -> int:
    """Memory that can still be allocated here without swapping: the host's, or what is left of the cgroup's.

    Asked before allocating, since beyond it the kernel would not refuse but kill.
    """
    left = [_meminfo_available()]
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):  # no such cgroup, or the limit is the word "max"
            left.append(max(0, int(Path(limit).read_text()) - int(Path(used).read_text())))
    return min(left)


def _meminfo_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
