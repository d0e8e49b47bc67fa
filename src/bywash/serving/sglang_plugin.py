"""SGLang's way in: the entry point `bywash` of `sglang.srt.plugins`.

SGLang calls `register` in each of its processes. Without BYWASH_SGLANG=1 in the environment nothing happens; with it,
bywash registers as the provider of `--moe-a2a-backend customized`: layers keep SGLang's own weights and kernels and
get bywash's dispatcher. Knows nothing of rows.
"""

import os
from typing import Any

from bywash.errors import ConfigError

SWITCH = "BYWASH_SGLANG"
MOST_TOKENS = "BYWASH_MAX_TOKENS"
_DEFAULT_MOST_TOKENS = 8192


def asked_for() -> bool:
    """Whether the environment switches bywash on.

    Raises:
        ConfigError: the switch has a value that means nothing.
    """
    value = os.environ.get(SWITCH, "")
    if value not in ("", "0", "1"):
        raise ConfigError(f"{SWITCH}={value}: 1 offers bywash to SGLang, 0 or nothing leaves SGLang as it is")
    return value == "1"


def most_tokens() -> int:
    """The most tokens that a rank brings to a step: sizes the buffers on GPUs. At least --chunked-prefill-size.

    Raises:
        ConfigError: not a whole number above 0.
    """
    value = os.environ.get(MOST_TOKENS, str(_DEFAULT_MOST_TOKENS))
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"{MOST_TOKENS}={value}: a whole number of tokens above 0 is needed")
    return int(value)


class Provider:
    """What SGLang asks for the two parts of a layer when the `customized` backend is chosen."""

    def prepare_layer(self, *, layer: Any, prefix: str, native_method: Any, runner_config: Any) -> Any:
        """SGLang's own method for the weights and the kernel, bywash's dispatcher for the rows."""
        from sglang.srt.layers.moe.customized import CustomizedMoELayer

        from bywash.serving.sglang_dispatcher import make_dispatcher

        return CustomizedMoELayer(method=native_method, dispatcher_factory=make_dispatcher)


def register() -> None:
    """Called by SGLang, in every process, possibly more than once.

    Raises:
        ConfigError: see `asked_for`; or an SGLang without customized MoE layers.
    """
    if not asked_for():
        return
    try:
        from sglang.srt.layers.moe import customized
    except ImportError as error:
        raise ConfigError(
            f"{SWITCH}=1: bywash is written after SGLang of November 2026 and does not fit this one ({error}); "
            f"unset {SWITCH}"
        ) from error

    if not isinstance(getattr(customized, "_provider", None), Provider):
        customized.register_customized_moe_provider(Provider())
