import gc
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from bywash.memory import Heap, available_bytes


def mappings():
    return Path("/proc/self/maps").read_text().count("bywash-heap")


def open_files():
    return len(os.listdir("/proc/self/fd"))


def test_two_mappings_of_one_heap_are_the_same_zeroed_memory():
    descriptor = Heap.create(10_000)
    one, other = Heap(descriptor, 10_000), Heap(descriptor, 10_000)
    os.close(descriptor)
    assert not any(one.buffer)
    one.buffer[1234] = 56
    assert other.buffer[1234] == 56


def test_every_page_is_there_before_it_is_touched():
    """ftruncate alone would leave holes, and a full memory would kill the reader with SIGBUS instead of an error."""
    size = 1 << 20
    descriptor = Heap.create(size)
    assert os.fstat(descriptor).st_blocks * 512 >= size
    os.close(descriptor)


def test_no_one_who_holds_the_descriptor_can_shrink_it():
    descriptor = Heap.create(8192)
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 4096)
    os.close(descriptor)


def test_memory_without_the_seal_or_of_another_size_is_not_mapped():
    descriptor = os.memfd_create("unsealed")
    os.posix_fallocate(descriptor, 0, 4096)
    with pytest.raises(OSError, match="not sealed"):
        Heap(descriptor, 4096)
    with pytest.raises(OSError, match="4096 bytes, 8192 were agreed"):
        Heap(descriptor, 8192)
    os.close(descriptor)


def test_more_than_the_machine_has_is_refused_before_the_kernel_would_kill_somebody():
    before = open_files()
    with pytest.raises(OSError, match="Cannot allocate memory"):
        Heap.create(1 << 50)
    assert open_files() == before


def test_an_allocation_that_fails_leaves_no_descriptor():
    before, (soft, hard) = open_files(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            Heap.create(8192)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert open_files() == before


def test_memory_goes_with_the_last_view_and_holds_no_descriptor():
    before, files = mappings(), open_files()
    descriptor = Heap.create(1 << 16)
    heap = Heap(descriptor, 1 << 16)
    os.close(descriptor)
    view = np.frombuffer(heap.buffer, dtype=np.uint64)[5:9]
    assert open_files() == files
    del heap
    gc.collect()
    assert mappings() == before + 1
    view[:] = 7
    assert view.tolist() == [7, 7, 7, 7]
    del view
    gc.collect()
    assert mappings() == before


def test_available_memory_is_what_the_host_has_at_most():
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < available_bytes() <= total
