"""Compiled kernels on a device: load, fill in parameters, launch on a stream.

Goes through the driver so that a launch costs a few microseconds of Python and nothing else, and so that it can be
captured in a CUDA graph. Knows nothing of what the kernels do. `Kernels` is for the exchange, whose kernels share one
block of parameters; `load_functions` and `launch` serve every other module that has kernels.
"""

import ctypes
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bywash.errors import ConfigError
from bywash.kernels.compile import THREADS, KernelShape, compile_kernels, kernel_source
from bywash.kernels.driver import check, driver

_FIELD = re.compile(r"^  u64 (\w+);", re.MULTILINE)
_DEFAULT_SHARED_BYTES = 48 * 1024


def parameter_names() -> tuple[str, ...]:
    """The fields of `Params` in the kernels' source, in order, without the peers' addresses that follow them."""
    text = kernel_source()
    body = text[text.index("struct Params {") :]
    return tuple(_FIELD.findall(body[: body.index("};")]))


def load_functions(code: bytes, names: Sequence[str], who: str, *, shared_bytes: int = 0) -> list[Any]:
    """Kernels of a cubin, loaded into the current device for as long as the process lives.

    Args:
        code: from `compile_source`.
        names: of the kernels.
        who: for the error.
        shared_bytes: dynamic shared memory that a block of each may be launched with.

    Raises:
        ConfigError: the driver refuses.
    """
    torch.cuda.synchronize()  # makes the device's context, if nothing has yet
    calls = driver()
    module = check(calls.cuModuleLoadData(code), "loading the kernels", who)
    functions = [check(calls.cuModuleGetFunction(module, name.encode()), f"finding {name}", who) for name in names]
    if shared_bytes > _DEFAULT_SHARED_BYTES:
        attribute = calls.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        for function in functions:
            status = calls.cuFuncSetAttribute(function, attribute, shared_bytes)
            check(status, f"asking for {shared_bytes} bytes of shared memory", who)
    return functions


def launch(
    function: Any, blocks: int, threads: int, arguments: Sequence[Any], what: str, who: str, *, shared_bytes: int = 0
) -> None:
    """Launch a kernel on torch's current stream. The driver copies the arguments, so they may change afterwards.

    Args:
        function: from the driver.
        blocks, threads: of the grid and of a block, both in one dimension.
        arguments: ctypes values, passed by value.
        what, who: for the error: what was launched, and by whom.
        shared_bytes: dynamic shared memory of a block.

    Raises:
        ConfigError: the driver refuses.
    """
    addresses = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
    stream, grid, block = torch.cuda.current_stream().cuda_stream, (blocks, 1, 1), (threads, 1, 1)
    calls = driver()
    status = calls.cuLaunchKernel(function, *grid, *block, shared_bytes, stream, ctypes.addressof(addresses), 0)
    check(status, f"launching {what}", who)


class Kernels:
    """The kernels of one static shape, loaded into the current device.

    Attributes:
        shape: what they were compiled for.
        fields: names of the parameters that every kernel takes.
    """

    def __init__(self, code: bytes, shape: KernelShape) -> None:
        """Load `code` into the current context."""
        self.shape = shape
        self.fields = parameter_names()
        self._driver = driver()
        self._module = check(self._driver.cuModuleLoadData(code), "loading the kernels")
        self._functions: dict[str, Any] = {}
        self._configs: dict[tuple[int, bool], Any] = {}

    def parameters(self, values: Mapping[str, int], peers: Sequence[int]) -> ctypes.Array[ctypes.c_uint64]:
        """The block of parameters that a launch passes by value; fields may be changed later with `set`."""
        words = [values.get(name, 0) for name in self.fields]
        return (ctypes.c_uint64 * (len(words) + len(peers)))(*words, *peers)

    def set(self, parameters: ctypes.Array[ctypes.c_uint64], **values: int) -> None:
        """Change fields of a block made by `parameters`."""
        for name, value in values.items():
            parameters[self.fields.index(name)] = value

    def launch(self, name: str, blocks: int, parameters: ctypes.Array[ctypes.c_uint64], *, early: bool = False) -> None:
        """Launch on torch's current stream. The driver copies the parameters, so they may change afterwards.

        Args:
            name: of the kernel.
            blocks: of the grid.
            parameters: made by `parameters`.
            early: make it ready while the kernel ahead of it ends (programmatic dependent launch, sm_90 or newer);
                it waits by itself before it touches memory.
        """
        argument = (ctypes.c_void_p * 1)(ctypes.addressof(parameters))
        config = self._config(blocks, early)
        config.hStream = torch.cuda.current_stream().cuda_stream
        status = self._driver.cuLaunchKernelEx(config, self.function(name), ctypes.addressof(argument), 0)
        check(status, f"launching {name}")

    def _config(self, blocks: int, early: bool) -> Any:
        if (blocks, early) not in self._configs:
            config = self._driver.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
            config.blockDimX, config.blockDimY, config.blockDimZ = THREADS, 1, 1
            config.sharedMemBytes = self.shape.shared_bytes
            if early:
                attribute = self._driver.CUlaunchAttribute()
                attribute.id = self._driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
                attribute.value.programmaticStreamSerializationAllowed = 1
                config.attrs, config.numAttrs = [attribute], 1
            self._configs[blocks, early] = config
        return self._configs[blocks, early]

    def function(self, name: str) -> Any:
        """A kernel, for callers that launch it with parameters of their own."""
        if name not in self._functions:
            function = check(self._driver.cuModuleGetFunction(self._module, name.encode()), f"finding {name}")
            if self.shape.shared_bytes > _DEFAULT_SHARED_BYTES:
                attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                check(
                    self._driver.cuFuncSetAttribute(function, attribute, self.shape.shared_bytes),
                    f"asking for {self.shape.shared_bytes} bytes of shared memory ({self.shape.experts} experts)",
                )
            self._functions[name] = function
        return self._functions[name]


def load_kernels(shape: KernelShape) -> Kernels:
    """Compile for the current device, or take from the cache, and load.

    Raises:
        ConfigError: packages missing, a device older than sm_80, or the kernels do not compile or load.
    """
    torch.cuda.synchronize()  # makes the device's context, if nothing has yet
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        raise ConfigError(f"exchange peer: this GPU is sm_{major}{minor}; sm_80 or newer is needed")
    # The `a` variants are for instructions of one architecture; the kernels use none, and plain code runs on later
    # minor versions too.
    return Kernels(compile_kernels(shape, f"sm_{major}{minor}"), shape)
