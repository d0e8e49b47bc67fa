"""`bywash run --check`: is what many ranks computed what one process computes?

Rank 0 runs the same job again twice, alone: once through our own stages with one rank (bitwise reference) and once
as transformers itself runs the model (independent reference, equal within rounding).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers
from torch import Tensor

from bywash.models.job import JobOptions, run_job
from bywash.models.loader import DTYPES

TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}
"""Accepted logit difference to transformers, relative to the largest logit if that exceeds 1. In float32 it bounds the
largest difference. At 8 to 11 bits of mantissa the two round at other places, and now and then that flips a router's
choice between two nearly equal experts, which changes a token's logits a lot (transformers' own expert implementations
differ among themselves in the same way); there it bounds the typical token's difference, the median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """What the check found.

    Attributes:
        tokens_identical: generated ids equal our own single process's.
        tokens_identical_transformers: generated ids equal those of transformers' `generate`.
        logits_identical: prefill logits equal our own single process's bit for bit (expected with `exact`).
        max_abs_logit_diff: largest prefill logit difference to transformers' single process.
        median_token_logit_diff: median over tokens of each one's largest difference.
        max_abs_logit: the largest logit there, for scale.
        logits_sha256: of the float32 bytes of all prefill logits, prompts in order.
        router_identical: our gates chose the same ids and weights as the model's own router, everywhere.
        tolerance: what the largest (float32) or median (bfloat16, float16) difference was held against.
    """

    tokens_identical: bool
    tokens_identical_transformers: bool
    logits_identical: bool
    max_abs_logit_diff: float
    median_token_logit_diff: float
    max_abs_logit: float
    logits_sha256: str
    router_identical: bool
    tolerance: float

    def failures(self, combine: str, dtype: str) -> list[str]:
        """What is wrong, in words; empty when all is well. `exact` promises ids and bits, the others closeness."""
        which, judged = (
            ("largest", self.max_abs_logit_diff) if dtype == "float32" else ("median", self.median_token_logit_diff)
        )
        found = []
        if not self.router_identical:
            found.append("our gate and the model's own router chose differently")
        if not judged <= self.tolerance:
            found.append(
                f"the {which} difference of prefill logits to transformers is {judged:.3g}, "
                f"more than {self.tolerance:.3g}"
            )
        if combine == "exact" and not self.logits_identical:
            found.append("prefill logits are not bitwise those of one rank")
        if combine == "exact" and not self.tokens_identical:
            found.append("generated ids differ from one process")
        return found


def check_run(
    options: JobOptions, tokens: dict[int, list[int]], logits: dict[int, Tensor], router_mismatches: int
) -> CheckReport:
    """Compare a finished run with one process. Takes about as long as two single-process runs."""
    alone = run_job(replace(options, exchange="auto", link=None, speeds=(), trace=False), None)
    ours = [logits[p] for p in sorted(logits)]
    theirs, their_tokens = _transformers_alone(options)
    diff_T = torch.cat([(a - b).abs().amax(dim=1) for a, b in zip(ours, theirs, strict=True)])
    scale = max(float(b.abs().max()) for b in theirs)
    single = [alone.generation.prefill_logits[p] for p in sorted(logits)]
    return CheckReport(
        tokens_identical=tokens == alone.generation.tokens,
        tokens_identical_transformers=[tokens[p] for p in sorted(tokens)] == their_tokens,
        logits_identical=all(torch.equal(a, b) for a, b in zip(ours, single, strict=True)),
        max_abs_logit_diff=float(diff_T.max()),
        median_token_logit_diff=float(diff_T.median()),
        max_abs_logit=scale,
        logits_sha256=logits_sha256(ours),
        router_identical=router_mismatches == 0 and alone.router_mismatches == 0,
        tolerance=TOLERANCE[options.dtype] * max(1.0, scale),
    )


def logits_sha256(logits: Sequence[Tensor]) -> str:
    """SHA-256 of the float32 bytes of the prompts' prefill logits, in order."""
    digest = hashlib.sha256()
    for part in logits:
        digest.update(part.float().contiguous().numpy().tobytes())
    return digest.hexdigest()


@torch.inference_mode()
def _transformers_alone(options: JobOptions) -> tuple[list[Tensor], list[list[int]]]:
    """Prefill logits and greedy ids of each prompt as transformers computes them: no padding, no bywash."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        Path(options.directory),
        dtype=DTYPES[options.dtype],
        local_files_only=True,
        experts_implementation="eager",
    ).eval()
    stop = list(options.stop_ids) or None
    logits, tokens = [], []
    for prompt in options.prompts:
        ids = torch.tensor([prompt])
        logits.append(model(input_ids=ids).logits[0].float())
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=options.new_tokens,
            do_sample=False,
            eos_token_id=stop,
            pad_token_id=0,
        )
        tokens.append([int(i) for i in out[0, len(prompt) :]])
    return logits, tokens
