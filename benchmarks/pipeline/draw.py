"""Draw a timeline (`bywash bench layer --timeline`, `bywash run --timeline`) as SVG, for documents.

bywash bench layer --timeline overlap.json
python benchmarks/pipeline/draw.py overlap.json --processes 0,4 --output docs/overlap.svg
"""

import argparse
import json
from pathlib import Path

from bywash.report.timeline import cut_to_layers, trace_svg


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--processes", default="", help="which to draw, by number, with commas; all by default")
    parser.add_argument("--layers", help="draw only while these run, such as 7-8")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    chosen = [int(part) for part in options.processes.split(",") if part]
    trace = json.loads(options.trace.read_text())
    if options.layers:
        first, _, last = options.layers.partition("-")
        trace = cut_to_layers(trace, int(first), int(last or first))
    options.output.write_text(trace_svg(trace, processes=chosen))


if __name__ == "__main__":
    main()
