"""vLLM's way in: the entry point `bywash` of `vllm.general_plugins`.

vLLM calls `register` in each of its processes. Without BYWASH_VLLM=1 in the environment nothing happens; with it, MoE
layers that vLLM would serve by its default all-to-all backend (all-gather and reduce-scatter) get bywash's. vLLM has
no registry for that, so the function that makes a layer's prepare/finalize is wrapped. Knows nothing of rows.
"""

import os
import sys
from typing import Any

from bywash.errors import ConfigError

SWITCH = "BYWASH_VLLM"
_MAKER = "maybe_make_prepare_finalize"


def asked_for() -> bool:
    """Whether the environment switches bywash on.

    Raises:
        ConfigError: the switch has a value that means nothing.
    """
    value = os.environ.get(SWITCH, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"{SWITCH}={value}: 1 switches bywash's exchange on, 0 or nothing leaves vLLM as it is")
    return value == "1"


def register() -> None:
    """Called by vLLM, in every process, possibly more than once.

    Raises:
        ConfigError: see `asked_for`; or a vLLM that has no such function.
    """
    if not asked_for():
        return
    try:
        from vllm.model_executor.layers.fused_moe import all2all_utils

        original = getattr(all2all_utils, _MAKER)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{SWITCH}=1: bywash is written for vLLM 0.32 and does not fit this one ({error}); unset {SWITCH}"
        ) from error
    if getattr(original, "_bywash", False):
        return

    def made_by_bywash(*args: Any, **options: Any) -> Any:
        from bywash.serving.vllm_halves import make_halves

        return make_halves(original, *args, **options)

    made_by_bywash._bywash = True  # type: ignore[attr-defined]
    # Others have taken the function by name already: it is replaced wherever it is found.
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("vllm.") and getattr(module, _MAKER, None) is original:
            setattr(module, _MAKER, made_by_bywash)
