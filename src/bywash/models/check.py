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

from bywash.models.job import JobOptions, own_device, run_job
from bywash.models.loader import DTYPES

TOLERANCE = 1e-5
"""Accepted float32 logit difference to transformers, relative to the largest logit if that exceeds 1."""

HALF_RATIO = 2.0
"""In bfloat16 and float16 a rounding now and then flips a router's choice between two nearly equal experts, which
changes a token's logits a lot, in transformers as in bywash. So both are held against transformers in float32: our
tokens may be this many times as far from it, on average, as transformers' own at the same dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """What the check found.

    Attributes:
        tokens_identical: generated ids equal our own single process's.
        tokens_identical_transformers: generated ids equal those of transformers' `generate`.
        logits_identical: prefill logits equal our own single process's bit for bit (expected with `exact`).
        max_abs_logit_diff: largest prefill logit difference to transformers' single process.
        token_diff_to_float32: in bfloat16 and float16 a token's largest logit difference to transformers in float32,
            mean over tokens; None in float32.
        transformers_token_diff_to_float32: the same of transformers at this dtype.
        max_abs_logit: the largest logit there, for scale.
        logits_sha256: of the float32 bytes of all prefill logits, prompts in order.
        router_identical: our gates chose the same ids and weights as the model's own router, everywhere.
        tolerance: what `max_abs_logit_diff` (float32) or `token_diff_to_float32` was held against.
    """

    tokens_identical: bool
    tokens_identical_transformers: bool
    logits_identical: bool
    max_abs_logit_diff: float
    max_abs_logit: float
    token_diff_to_float32: float | None
    transformers_token_diff_to_float32: float | None
    logits_sha256: str
    router_identical: bool
    tolerance: float

    def failures(self, combine: str) -> list[str]:
        """What is wrong, in words; empty when all is well. `exact` promises ids and bits, the others closeness."""
        to_float32 = self.token_diff_to_float32
        judged = self.max_abs_logit_diff if to_float32 is None else to_float32
        what = "the largest difference" if to_float32 is None else "a token's mean distance from float32, of"
        found = []
        if not self.router_identical:
            found.append("our gate and the model's own router chose differently")
        if not judged <= self.tolerance:
            found.append(
                f"{what} prefill logits to transformers is {judged:.3g}, more than {self.tolerance:.3g}"
                if to_float32 is None
                else f"{what} prefill logits, is {judged:.3g}, more than {self.tolerance:.3g}"
            )
        if combine == "exact" and not self.logits_identical:
            found.append("prefill logits are not bitwise those of one rank")
        if combine == "exact" and not self.tokens_identical:
            found.append("generated ids differ from one process")
        return found


def check_run(
    options: JobOptions, tokens: dict[int, list[int]], logits: dict[int, Tensor], router_mismatches: int
) -> CheckReport:
    """Compare a finished run with one process on the device of the run. Takes about as long as two such runs.

    `options.device` says where the run's model was.
    """
    alone = run_job(
        replace(
            options, exchange="auto", link=None, speeds=(), trace=False, overlap="off", timeline=False, overflow=None
        ),
        None,
    )
    ours = [logits[p] for p in sorted(logits)]
    theirs, their_tokens = _transformers_alone(options)
    scale = max(float(b.abs().max()) for b in theirs)
    single = [alone.generation.prefill_logits[p] for p in sorted(logits)]
    to_float32 = their_to_float32 = None
    tolerance = TOLERANCE * max(1.0, scale)
    if options.dtype != "float32":
        reference, _ = _transformers_alone(replace(options, dtype="float32", new_tokens=1))
        to_float32 = float(_token_diffs(ours, reference).mean())
        their_to_float32 = float(_token_diffs(theirs, reference).mean())
        tolerance = HALF_RATIO * their_to_float32
    return CheckReport(
        tokens_identical=tokens == alone.generation.tokens,
        tokens_identical_transformers=[tokens[p] for p in sorted(tokens)] == their_tokens,
        logits_identical=all(torch.equal(a, b) for a, b in zip(ours, single, strict=True)),
        max_abs_logit_diff=float(_token_diffs(ours, theirs).max()),
        max_abs_logit=scale,
        token_diff_to_float32=to_float32,
        transformers_token_diff_to_float32=their_to_float32,
        logits_sha256=logits_sha256(ours),
        router_identical=router_mismatches == 0 and alone.router_mismatches == 0,
        tolerance=tolerance,
    )


def _token_diffs(left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
    """[tokens of all prompts]: each one's largest logit difference."""
    return torch.cat([(a - b).abs().amax(dim=1) for a, b in zip(left, right, strict=True)])


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
    device = own_device(options.device or "cpu", 0)
    model = model.to(device)
    logits, tokens = [], []
    for prompt in options.prompts:
        ids = torch.tensor([prompt], device=device)
        logits.append(model(input_ids=ids).logits[0].float().cpu())
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=options.new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        tokens.append([int(i) for i in out[0, len(prompt) :]])
    return logits, tokens
