"""The plan of a step on the GPU: `plan.cu` compiled, loaded and launched, its arrays as torch tensors.

Shapes: R ranks, E experts, S slots per rank. The same integers as `balance.plan_step`; no host sync, and the launch can
be captured in a CUDA graph. Knows nothing of exchanges: counts are wherever the caller put them on the device.
"""

import ctypes
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bywash.balance.limits import ATTEMPTS, Limits, SlotDirectory
from bywash.balance.placement import Placement
from bywash.balance.plan import digest32
from bywash.errors import ConfigError
from bywash.kernels.compile import compile_source, kernel_source
from bywash.kernels.driver import check as check_driver
from bywash.kernels.driver import driver
from bywash.kernels.launch import launch

SOURCES = ("plan_attempt.cuh", "plan_keep.cuh", "plan.cu")
THREADS = 512
MAX_RANKS, MAX_EXPERTS, MAX_SLOTS = 64, 1024, 128
"""A bit for each rank of an expert, experts in shared memory, slots of a rank in the registers of a warp."""
_DEFAULT_SHARED_BYTES = 48 * 1024
_COUNTS_ALIGNMENT = 16

check = partial(check_driver, who="plan")


def parameter_names() -> tuple[str, ...]:
    """The fields of `PlanParams` in the source, in order."""
    text = kernel_source(SOURCES)
    body = text[text.index("struct PlanParams {") :]
    return tuple(re.findall(r"^  u64 (\w+);", body[: body.index("};")], re.MULTILINE))


def compile_plan(ranks: int, experts: int, slots: int, arch: str, *, cache: Path | None = None) -> bytes:
    """Machine code for one static shape, such as for arch `sm_90`.

    Raises:
        ConfigError: a shape beyond the limits, packages missing, or NVRTC refuses.
    """
    for name, value, least, most in (
        ("ranks", ranks, 1, MAX_RANKS),
        ("experts", experts, 1, MAX_EXPERTS),
        ("slots per rank", slots, 0, MAX_SLOTS),
    ):
        if not least <= value <= most:
            raise ConfigError(f"plan: {value} {name}; {least} to {most} are supported on a GPU")
    macros = [("RANKS", str(ranks)), ("EXPERTS", str(experts)), ("SLOTS", str(slots))]
    return compile_source(kernel_source(SOURCES), macros, arch, name="plan", what="plan", cache=cache)


def empty_hash(placement: Placement, slots: int) -> int:
    """What homes, no rows and no fetches add to the digest; the kernel adds counts, keys and what differs from this."""
    ranks, experts = placement.ranks, placement.num_experts
    parts = (experts, experts + ranks * experts, ranks * slots, ranks * slots)
    after_counts, after_rows, after_keys, end = (sum(parts[: i + 1]) for i in range(4))
    words = np.zeros(end, np.int32)
    words[experts : 2 * experts], words[after_keys:] = placement.home_E, -1
    upto = {at: digest32(words[:at]) for at in (after_counts, after_rows, after_keys, end)}
    return (upto[after_rows] - upto[after_counts] + upto[end] - upto[after_keys]) % 2**32


def places(placement: Placement) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """int32 [E], experts sorted by home, then number; int32 [R + 1], where each rank's begin."""
    expert_P = np.argsort(placement.home_E, kind="stable")
    first_R = np.searchsorted(placement.home_E[expert_P], np.arange(placement.ranks + 1))
    return expert_P.astype(np.int32), first_R.astype(np.int32)


class DevicePlanner:
    """Plans of one placement and one set of limits on the current device.

    Attributes:
        rows_ER, rows_R, fetch_RS, digest: the last plan, see `StepPlan`; int32, int64 [R], int32, int32 [1] (the bits).
        keys_RS, ages_RS, hot_LE: the directory, int32; changed by every plan.
    """

    def __init__(self, placement: Placement, limits: Limits, directory: SlotDirectory) -> None:
        """Compile, or take from the cache, load, and put the directory on the device.

        Raises:
            ConfigError: see `compile_plan`; or more experts than the device has shared memory for.
        """
        ranks, experts = placement.ranks, placement.num_experts
        slots = directory.keys_RS.shape[1]
        torch.cuda.synchronize()  # makes the device's context, if nothing has yet
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        code = compile_plan(ranks, experts, slots, f"sm_{properties.major}{properties.minor}")
        self._driver = driver()
        self._module = check(self._driver.cuModuleLoadData(code), "loading the planner")
        self._function = check(self._driver.cuModuleGetFunction(self._module, b"plan_step"), "finding plan_step")
        self._shared_bytes = self._read_shared_bytes()
        self._allow_shared(experts)
        self.limits, self.layers, self._names = limits, directory.layers, parameter_names()
        self.keys_RS = torch.from_numpy(directory.keys_RS.copy()).cuda()
        self.ages_RS = torch.from_numpy(directory.ages_RS.copy()).cuda()
        self.hot_LE = torch.from_numpy(directory.hot_LE.copy()).cuda()
        self._home_E = torch.from_numpy(placement.home_E).cuda()
        self._expert_P, self._first_R = (torch.from_numpy(array).cuda() for array in places(placement))
        self._speeds_R = torch.from_numpy(limits.speeds_R(ranks)).int().cuda()
        self.rows_ER = torch.empty(experts, ranks, dtype=torch.int32, device="cuda")
        self.rows_R = torch.empty(ranks, dtype=torch.int64, device="cuda")
        self.fetch_RS = torch.empty_like(self.keys_RS)
        self.digest = torch.empty(1, dtype=torch.int32, device="cuda")
        self._away = torch.ones(1, dtype=torch.int32, device="cuda")
        self._pieces = torch.empty(ATTEMPTS, max(1, ranks * slots), dtype=torch.int64, device="cuda")
        self._parameters = self._fill_parameters(empty_hash(placement, slots))

    def __call__(self, counts_RE: Tensor, layer: int = 0) -> None:
        """Plan from int32 [R, E] on the device, on torch's current stream; the results are in the attributes.

        Raises:
            ConfigError: counts that do not begin at a multiple of 16 bytes, or the driver refuses.
        """
        if counts_RE.data_ptr() % _COUNTS_ALIGNMENT:
            raise ConfigError(
                f"plan: counts begin at {counts_RE.data_ptr():#x}, not at a multiple of 16 bytes; clone them"
            )
        self._parameters[self._names.index("counts_RE")] = counts_RE.data_ptr()
        self._parameters[self._names.index("layer")] = layer
        arguments = (self._parameters,)
        launch(self._function, 1, THREADS, arguments, "plan_step", "plan", shared_bytes=self._shared_bytes)

    def _fill_parameters(self, empty_hash: int) -> ctypes.Array[ctypes.c_uint64]:
        tensors = {
            "home_E": self._home_E,
            "expert_P": self._expert_P,
            "first_R": self._first_R,
            "speeds_R": self._speeds_R,
            "keys_RS": self.keys_RS,
            "ages_RS": self.ages_RS,
            "hot_LE": self.hot_LE,
            "rows_ER": self.rows_ER,
            "fetch_RS": self.fetch_RS,
            "rows_R": self.rows_R,
            "digest": self.digest,
            "away": self._away,
            "pieces": self._pieces,
        }
        values = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        values |= {"layers": self.layers, "empty_hash": empty_hash}
        for name in ("capacity", "alpha_1024", "fetch_rows", "use_rows", "keep"):
            values[name] = getattr(self.limits, name)
        return (ctypes.c_uint64 * len(self._names))(*(values.get(name, 0) for name in self._names))

    def _read_shared_bytes(self) -> int:
        address, size = check(self._driver.cuModuleGetGlobal(self._module, b"plan_shared_bytes"), "reading plan.cu")
        value = ctypes.c_uint32()
        assert size == ctypes.sizeof(value)
        check(self._driver.cuMemcpyDtoH(ctypes.addressof(value), address, size), "reading plan.cu")
        return value.value

    def _allow_shared(self, experts: int) -> None:
        if self._shared_bytes <= _DEFAULT_SHARED_BYTES:
            return
        attribute: Any = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(
            self._driver.cuFuncSetAttribute(self._function, attribute, self._shared_bytes),
            f"asking for {self._shared_bytes} bytes of shared memory to plan {experts} experts",
        )
