"""The slow, obvious oracle of the pipeline: every batch alone through every layer, stage by stage, on one thread."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from bywash.moe.layer import ExpertParallel
from bywash.moe.pipeline.forward import DenseStages, LayerStages


def forward_naive(layers: Sequence[LayerStages], experts: Mapping[int, ExpertParallel], batches: Sequence[Any]) -> None:
    """Advance the batches' residual streams. `experts` are those of one process, which has them all."""
    for batch in batches:
        for index, layer in enumerate(layers):
            if layer.form.attention:
                layer.attention(batch)
            if not layer.form.moe:
                cast(DenseStages, layer).dense(batch)
                continue
            routed_TD = experts[index](*layer.route(batch))
            shared = layer.shared_expert(batch) if layer.form.shared else None
            layer.finish(batch, routed_TD, shared)
