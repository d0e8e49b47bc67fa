"""Device generations: what a vendor's data sheet promises of each. What of it a kernel reaches is `compute`'s affair.

Knows nothing of hosts or models. `cluster` resolves the names that people write; own generations are added there.
"""

from dataclasses import dataclass

from bywash.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One generation of device. Rates are peaks without sparsity; 10^12 operations, 10^9 bytes per second.

    Attributes:
        name: as people write it.
        bf16_tflops, fp8_tflops: of matrix products; 0 where the device has none, so that it computes in bf16.
        memory_gb: 10^9 bytes, as the device reports them.
        memory_gbytes_per_s: reading its own memory.
        peer_gbytes_per_s: to the other devices of its host all together, one direction.
        source: where the figures come from.
    """

    name: str
    bf16_tflops: float
    fp8_tflops: float
    memory_gb: float
    memory_gbytes_per_s: float
    peer_gbytes_per_s: float
    source: str

    @property
    def is_cpu(self) -> bool:
        """Whether this is a core of a host: for plans that a laptop runs."""
        return self.is_cpu_name(self.name)

    @staticmethod
    def is_cpu_name(name: str) -> bool:
        """By name, since launch files know no more of a device."""
        return name.startswith("cpu")

    def tflops(self, dtype: str) -> float:
        """The peak at which weights of `dtype` (fp8, mxfp4, bf16, fp32) are multiplied; bf16's where fp8 is missing."""
        return self.fp8_tflops if dtype == "fp8" and self.fp8_tflops else self.bf16_tflops


DEVICES: dict[str, Device] = {
    one.name: one
    for one in (
        Device(
            name="a100",
            bf16_tflops=312.0,
            fp8_tflops=0.0,
            memory_gb=85.0,
            memory_gbytes_per_s=2039.0,
            peer_gbytes_per_s=300.0,
            source="NVIDIA A100 data sheet, 80 GB SXM: 312 TFLOPS, 2,039 GB/s, NVLink 600 GB/s both ways",
        ),
        Device(
            name="h100",
            bf16_tflops=989.0,
            fp8_tflops=1979.0,
            memory_gb=85.0,
            memory_gbytes_per_s=3350.0,
            peer_gbytes_per_s=450.0,
            source="NVIDIA H100 data sheet, SXM, without sparsity: 989 / 1,979 TFLOPS, 3.35 TB/s, NVLink 900 GB/s",
        ),
        Device(
            name="h200",
            bf16_tflops=989.0,
            fp8_tflops=1979.0,
            memory_gb=150.0,
            memory_gbytes_per_s=4800.0,
            peer_gbytes_per_s=450.0,
            source="NVIDIA H200 data sheet, SXM, without sparsity: 989 / 1,979 TFLOPS, 4.8 TB/s, NVLink 900 GB/s",
        ),
        Device(
            name="l40s",
            bf16_tflops=362.0,
            fp8_tflops=733.0,
            memory_gb=47.7,
            memory_gbytes_per_s=864.0,
            peer_gbytes_per_s=32.0,
            source="NVIDIA L40S data sheet, without sparsity: 362 / 733 TFLOPS, 864 GB/s, PCIe 4.0 x16",
        ),
        Device(
            name="b200",
            bf16_tflops=2250.0,
            fp8_tflops=4500.0,
            memory_gb=191.0,
            memory_gbytes_per_s=7700.0,
            peer_gbytes_per_s=900.0,
            source="NVIDIA HGX B200 data sheet, without sparsity: 2.25 / 4.5 PFLOPS, 7.7 TB/s, NVLink 1.8 TB/s",
        ),
        Device(
            name="cpu",
            bf16_tflops=0.05,
            fp8_tflops=0.0,
            memory_gb=4.0,
            memory_gbytes_per_s=8.0,
            peer_gbytes_per_s=4.0,
            source="estimates for one Zen 4 core in float32 (docs/benchmarks.md), for plans that a laptop runs",
        ),
    )
}


def find_device(name: str, known: dict[str, Device], where: str) -> Device:
    """The generation of that name. Raises `ConfigError` naming the field and the names there are."""
    if name not in known:
        raise ConfigError(f"{where} = {name!r}: must be one of {', '.join(known)}, or stand under cluster.devices")
    return known[name]
