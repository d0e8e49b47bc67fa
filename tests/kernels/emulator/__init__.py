"""The exchange's CUDA kernels on a CPU: their own source, compiled as C++ with `cuda_on_cpu.h`.

Ranks are threads of one process, heaps are CPU tensors. `emulated` patches the few places where `PeerDevice` meets the
GPU, so that tests/exchange/peer_steps.py runs unchanged. Finds wrong indices, wrong sums and deadlocks; knows nothing
of the GPU's memory order or speed.
"""

import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import threading
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch

from bywash.errors import RankLostError
from bywash.exchange import device_rows, peer_device, peer_tensors
from bywash.kernels import rows
from bywash.kernels.compile import kernel_source
from bywash.kernels.launch import Kernels, parameter_names
from bywash.kernels.rows import RowKernels
from bywash.memory import device_slots

COMPILER = shutil.which("g++")
HERE = Path(__file__).parent
STATEMENTS = {
    "ld.acquire": "word = __atomic_load_n((u64*)address, __ATOMIC_ACQUIRE); pass_turn();",
    "ld.relaxed": "word = __atomic_load_n((u64*)address, __ATOMIC_ACQUIRE);",
    "st.re": "__atomic_store_n((u64*)address, word, __ATOMIC_RELEASE);",
    "ld.global": "memcpy(&v, (const void*)address, 16);",
    "st.global": "memcpy((void*)address, &v, 16);",
    "mov.u64": "ns = emulated_now_ns();",
    "cvt.f32.f16": "f = half_to_float((u16)(v.w[i / 2] >> (i % 2 * 16)));",
    "cvt.rn.bf16x2": "v.w[i] = bfloat_bits(sum[2 * i + 1]) << 16 | bfloat_bits(sum[2 * i]);",
    "cvt.rn.f16x2": "v.w[i] = half_bits(sum[2 * i + 1]) << 16 | half_bits(sum[2 * i]);",
}
_ASM = re.compile(r'asm(?: volatile)?\((?:[^;"]|"[^"]*")*\);')


def _statement(match):
    text = match.group(0)
    return next((body for start, body in STATEMENTS.items() if f'"{start}' in text), text)


def emulated_library(shape):
    """The exchange's kernels of a shape as a shared library."""
    source = kernel_source()
    names = re.findall(r'extern "C" __global__ .*? (\w+)\(const', source)
    names = [name for name in names if shape.real_experts or not name.startswith("elastic")]
    return built(source, names, shape.macros())


def built(source, names, macros):
    """Kernels that take one block of `Params` as a shared library, kept between tests."""
    source = re.sub(r"#line.*", "", _ASM.sub(_statement, source))
    text = '#include "cuda_on_cpu.h"\n' + source.replace("extern __shared__", "extern thread_local")
    text += (HERE / "run.inc").read_text()
    flags = [f"-D{name}={value}" for name, value in macros]
    flags.append("-DKERNELS=" + ",".join(f'{{"{name}",{name}}}' for name in names))
    flags += ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-pthread", "-ffp-contract=off", f"-I{HERE}"]
    key = hashlib.sha256((text + (HERE / "cuda_on_cpu.h").read_text() + repr(flags)).encode()).hexdigest()[:24]
    path = Path(tempfile.gettempdir(), f"bywash-emulated-{os.getuid()}", f"{key}.so")
    path.parent.mkdir(exist_ok=True)
    with open(path.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ranks, threads or processes, ask for the same kernels at the same time
        if not path.exists():
            _compile(text, flags, path)
    return ctypes.CDLL(str(path))


def _compile(text, flags, path):
    with tempfile.NamedTemporaryFile(suffix=".cpp", mode="w", dir=path.parent) as file:
        file.write(text)
        file.flush()
        made = path.with_suffix(".part")
        subprocess.run([COMPILER, *flags, file.name, "-o", str(made)], check=True)
    made.replace(path)


class EmulatedKernels(Kernels):
    """`Kernels` on the CPU."""

    def __init__(self, shape):
        self.shape, self.fields, self._library = shape, parameter_names(), emulated_library(shape)

    def launch(self, name, blocks, parameters, *, early=False):
        assert self._library.launch(name.encode(), blocks, ctypes.byref(parameters)) == 0, name


class EmulatedRows(RowKernels):
    """`RowKernels` on the CPU."""

    def _loaded(self):
        # run.inc asks for the exchange's sizes, which these kernels have not.
        macros = [*rows.MACROS, ("EXPERTS", "1"), ("RANKS", "1")]
        self._library = built(kernel_source((rows.SOURCE,)), rows.KERNELS, macros)
        return {}

    def _launch(self, kernel, blocks, words):
        assert self._library.launch(kernel.encode(), blocks, ctypes.byref(words)) == 0, kernel


class Heap:
    """One rank's heap in CPU memory."""

    def __init__(self, heap_bytes):
        self.memory = torch.zeros(heap_bytes + 256, dtype=torch.uint8)
        self.skip = -self.memory.data_ptr() % 256
        self.address = self.memory.data_ptr() + self.skip

    def tensor(self, offset, shape, dtype):
        elements = torch.Size(shape).numel() * dtype.itemsize
        return self.memory[self.skip + offset : self.skip + offset + elements].view(dtype).view(shape)


class Pages:
    """Slots in CPU memory; those that `resize` took away hold NaN."""

    def __init__(self, part_bytes, parts):
        self.memory, self.part_bytes, self.parts = (
            torch.zeros(part_bytes * parts + 256, dtype=torch.uint8),
            part_bytes,
            parts,
        )
        self.resize(parts)

    def resize(self, parts):
        self.mapped_bytes = parts * self.part_bytes
        self.memory[self.mapped_bytes :] = 0xFF

    def tensor(self, shape, dtype):
        skip = -self.memory.data_ptr() % 256
        return self.memory[skip : skip + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)


class Threads:
    """A group whose ranks are threads."""

    def __init__(self, ranks, deadline_s):
        self.ranks, self.deadline_s, self.barrier, self.heaps = ranks, deadline_s, threading.Barrier(ranks), {}

    def rank(self, rank):
        def late(ranks, during):
            return RankLostError(f"rank {ranks} late while {during}", ranks)

        return SimpleNamespace(rank=rank, ranks=self.ranks, deadline_s=self.deadline_s, late=late, threads=self)

    def open_heaps(self, members, heap_bytes, *, arithmetic, facts):
        self.heaps[members.rank] = Heap(heap_bytes)
        self.barrier.wait(200)
        heaps = [self.heaps[rank] for rank in range(self.ranks)]
        self.barrier.wait(200)
        return heaps

    def run(self, function, *args):
        """`function(group, *args)` on every rank; answers by rank, or the first exception."""
        answers = [None] * self.ranks

        def work(rank):
            try:
                answers[rank] = function(self.rank(rank), *args)
            except BaseException as error:
                answers[rank] = error
                self.barrier.abort()

        workers = [threading.Thread(target=work, args=(rank,)) for rank in range(self.ranks)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        if errors:
            raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError | RankLostError))
        return answers


@contextmanager
def emulated():
    """Everything that says "cuda" in `PeerDevice` and in the tests' steps means the CPU."""
    properties = SimpleNamespace(multi_processor_count=3)
    cuda = {
        "is_available": lambda: True,
        "synchronize": lambda *_: None,
        "set_device": lambda _: None,
        "current_device": lambda: 0,
        "get_device_properties": lambda _: properties,
        "get_device_capability": lambda: (8, 0),
        "current_stream": lambda: SimpleNamespace(synchronize=lambda: None),
    }
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.cuda, **cuda))
        for where, name, value in (
            (torch.Tensor, "cuda", lambda self: self),
            (peer_device, "load_kernels", EmulatedKernels),
            (peer_device, "open_cuda_heaps", lambda members, *a, **k: members.threads.open_heaps(members, *a, **k)),
            (peer_device, "GPU", "cpu"),
            (peer_tensors, "GPU", "cpu"),
            (device_rows, "row_kernels", lambda device: EmulatedRows()),
            (device_slots, "PagedRange", Pages),
            (device_slots, "open_cuda_heaps", lambda members, *a, **k: members.threads.open_heaps(members, *a, **k)),
        ):
            stack.enter_context(mock.patch.object(where, name, value))
        yield
