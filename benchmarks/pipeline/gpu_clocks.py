"""Clocks and power while variants were timed, as `nvidia-smi` samples them in a process of its own."""

import contextlib
import statistics
import subprocess
import tempfile
from datetime import datetime
from pathlib import Path

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
