"""What the wire takes alone: the same steps with nothing computed."""

from dataclasses import replace

from benchmarks.pipeline.gpu_bench import Variant

from bywash.exchange.moves import GatherSteps
from bywash.moe.pipeline import build_schedule
from bywash.moe.pipeline.stack_cuda import GatherForward, devices_needed


class MovementOnly(GatherForward):
    """The steps without attention, router, experts and sums."""

    def attention(self, op, lane):
        """Nothing."""

    def shared(self, op, part):
        """Nothing."""

    def route(self, op, part):
        """Flags ready to go."""
        self._device(part).prepare(part.tokens, part.generation)

    def compute(self, op, part):
        """Await rows; flags of the sums ready to go."""
        for name in ("wait_rows", "prepare_outputs"):
            self._device(part).wait_only(name, part.generation)

    def finish(self, op, part):
        """Await sums."""
        self._device(part).wait_only("wait_outputs", part.generation)


def movement_of(bench, base):
    """A variant's movement, over the same channels, captured."""
    forward = MovementOnly(
        bench.sizes, base.forward.split, bench.weights, base.forward._experts, bench.local, base.devices
    )
    wire = Variant(bench, f"{base.name}, movement only", forward, base.schedule, base.devices)
    bench.meet()
    wire.capture()
    return wire


def movement_gbytes_per_s(bench, split, moves, layers=4):
    """What the way itself gives, one direction of one rank while all send: rows and sums, nothing computed."""
    sizes, layout, count = replace(bench.sizes, layers=layers), bench.layout(split), devices_needed(split)
    devices = [GatherSteps(bench.group, layout, bench.placement.home_E, make_moves=moves) for _ in range(count)]
    forward = MovementOnly(sizes, split, bench.weights, [None] * layers, bench.local, devices)
    variant = Variant(bench, "movement", forward, build_schedule([sizes.form] * layers, split), devices)
    bench.meet()
    variant.eager()
    variant.check()
    bench.meet()
    variant.capture()
    for _ in range(3):
        variant.measure()
    variant.check()
    size = layers * split.lanes * split.chunks * layout.tokens * (2 * 2 * sizes.hidden + 12 * sizes.top_k)
    return size * (bench.ranks - 1) / variant.median * 1e-6
