"""Clocks and power while variants were timed, as `nvidia-smi` samples them in a process of its own, and energy.

Energy is the device's own counter (NVML), in millijoules since the driver was loaded. Long products are bound by power,
so what moving rows takes in energy it takes in time, even where it waits for nothing.
"""

import contextlib
import ctypes
import statistics
import subprocess
import tempfile
from datetime import datetime
from pathlib import Path

import torch

EVERY_MS = 20
QUERY = "timestamp,index,clocks.sm,power.draw.instant"


class Clocks:
    """Samples of all GPUs from now until `close`. Without `nvidia-smi` there are none."""

    def __init__(self):
        self._path, self._process = Path(tempfile.mktemp()), None
        command = ["stdbuf", "-oL", "nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
        with contextlib.suppress(OSError):
            file = self._path.open("w")
            self._process = subprocess.Popen([*command, "-lms", str(EVERY_MS)], stdout=file, stderr=subprocess.STDOUT)

    def close(self):
        """(seconds since 1970, MHz, watts) of every sample."""
        if self._process is None:
            return []
        self._process.kill()
        self._process.wait()
        lines = self._path.read_text().splitlines()
        self._path.unlink()
        samples = [sample for sample in map(sample_of, lines) if sample]
        if not samples:
            print(f"no clocks: {lines[:2]}", flush=True)
        return samples


def sample_of(line):
    """One sample, or None of a line that is none. Example of a line: 2026/11/30 01:43:05.123, 0, 1755, 688.40."""
    try:
        stamp, _, mhz, watts = line.split(", ")
        return datetime.strptime(stamp, "%Y/%m/%d %H:%M:%S.%f").timestamp(), float(mhz), float(watts)
    except ValueError:
        return None


def within(samples, windows):
    """(median MHz, median watts, samples) of those in any of the (begin, end); None if there are none."""
    found = [one for one in samples if any(begin <= one[0] <= end for begin, end in windows)]
    if not found:
        return None
    return statistics.median(one[1] for one in found), statistics.median(one[2] for one in found), len(found)


class Energy:
    """Joules of the current device so far; None where NVML or its counter is missing."""

    def __init__(self):
        self._handle = ctypes.c_void_p()
        try:
            self._nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            self._nvml = None
            return
        uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}".encode()
        if self._nvml.nvmlInit_v2() or self._nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(self._handle)):
            self._nvml = None

    def joules(self):
        found = ctypes.c_ulonglong()
        if not self._nvml or self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle, ctypes.byref(found)):
            return None
        return found.value * 1e-3
