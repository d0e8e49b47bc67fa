"""Compile checks without a driver or a GPU: every architecture we name, odd and ordinary shapes."""

import pytest

from bywash.errors import ConfigError
from bywash.kernels.compile import KernelShape, compile_kernels, compiler_version

pytest.importorskip("cuda.core", reason="cuda-core is not installed: pip install 'bywash[cuda]'")
try:
    compiler_version()
except ConfigError as missing:
    pytest.skip(str(missing), allow_module_level=True)

SHAPES = {
    "deepseek": KernelShape(ranks=2, experts=256, top_k=8, vecs=896, dtype="bfloat16", exact=False),
    "exact": KernelShape(ranks=2, experts=256, top_k=8, vecs=896, dtype="bfloat16", exact=True),
    "elastic": KernelShape(
        ranks=2,
        experts=268,
        top_k=8,
        vecs=896,
        dtype="bfloat16",
        exact=False,
        real_experts=256,
        guests=6,
        mixed=True,
    ),
    "odd": KernelShape(ranks=5, experts=7, top_k=3, vecs=1, dtype="float16", exact=False),
    "fp8": KernelShape(ranks=2, experts=256, top_k=8, vecs=896, dtype="bfloat16", exact=False, fp8=1),
    "fp8-odd": KernelShape(ranks=3, experts=9, top_k=2, vecs=17, dtype="float16", exact=True, fp8=2),
    "alone": KernelShape(ranks=1, experts=4, top_k=2, vecs=3, dtype="bfloat16", exact=False),
    "wide": KernelShape(ranks=8, experts=512, top_k=22, vecs=5, dtype="float32", exact=True),
}


QUICK = [("deepseek", "sm_80"), ("deepseek", "sm_90a"), ("deepseek", "sm_100a"), ("fp8", "sm_90a"), ("alone", "sm_90a")]
SLOW = [
    ("exact", "sm_90a"),
    ("elastic", "sm_90a"),
    ("odd", "sm_80"),
    ("wide", "sm_100a"),
    ("fp8", "sm_80"),
    ("fp8-odd", "sm_100a"),
]


@pytest.mark.parametrize(("name", "arch"), QUICK + [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW])
def test_compiles(name, arch, tmp_path):
    code = compile_kernels(SHAPES[name], arch, cache=tmp_path)
    assert code[:4] == b"\x7fELF"
    for kernel in ("dispatch_send", "dispatch_receive", "dispatch_both", "dispatch_batch", "combine_both"):
        assert kernel.encode() in code


def test_cache_is_keyed_by_shape_and_architecture_and_survives_being_unwritable(tmp_path):
    shape = SHAPES["alone"]
    first = compile_kernels(shape, "sm_80", cache=tmp_path)
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(b"from the cache")
    assert compile_kernels(shape, "sm_80", cache=tmp_path) == b"from the cache"
    assert compile_kernels(shape, "sm_90a", cache=tmp_path) != b"from the cache"
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert compile_kernels(shape, "sm_80", cache=blocked / "below") == first


def test_an_unknown_architecture_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="sm_1"):
        compile_kernels(SHAPES["odd"], "sm_1", cache=tmp_path)


@pytest.mark.parametrize(("field", "value"), [("experts", 4096), ("top_k", 33), ("ranks", 0)])
def test_limits_are_named(field, value):
    shape = {"ranks": 2, "experts": 8, "top_k": 2, "vecs": 1, "dtype": "float32", "exact": True}
    with pytest.raises(ConfigError, match=str(value)):
        KernelShape(**{**shape, field: value})
