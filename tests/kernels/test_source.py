"""What Python and the kernels' source must agree on, checked on the text: no GPU and no compiler needed."""

import re

import torch

from bywash.exchange import peer_errors, peer_layout
from bywash.exchange.peer_layout import PeerLayout
from bywash.kernels.compile import MAX_BLOCKS, THREADS, KernelShape, kernel_source
from bywash.kernels.launch import parameter_names

SOURCE = kernel_source()
LAYOUT = PeerLayout(ranks=2, experts=8, top_k=2, tokens=10, hidden=5, dtype=torch.bfloat16, exact=True)


def enum_in_source(name):
    (body,) = re.findall(rf"enum {name} {{\s(.*?)\s}};", SOURCE, re.DOTALL)
    return {key: int(value) for key, value in re.findall(r"(\w+) = (\d+)", body)}


def test_every_offset_of_the_layout_is_a_parameter():
    names = parameter_names()
    assert len(set(names)) == len(names)
    assert set(LAYOUT.offsets(0)) == {name for name in names if name.startswith("at_")}


def test_block_size_and_failure_codes_agree():
    assert f"#define THREADS {THREADS}\n" in SOURCE
    assert f"#define MAX_BLOCKS {MAX_BLOCKS} " in SOURCE
    assert enum_in_source("Code") == {code.name: code.value for code in peer_errors.Code}
    assert len(enum_in_source("Phase")) == len(peer_errors.PHASES)


def test_state_and_failure_records_have_the_size_that_python_allocates():
    def fields(name):
        (body,) = re.findall(rf"struct {name} {{(.*?)}};", SOURCE, re.DOTALL)
        return re.findall(r"u(?:32|64) (\w+);", body)

    state = fields("State")
    assert state.index("digest") == peer_layout.DIGEST_WORD
    assert len(state) == peer_layout.STATE_WORDS
    assert fields("Failure").index("deadline_ns") == peer_layout.DEADLINE_WORD
    assert len(fields("Failure")) == peer_layout.FAILURE_WORDS


def test_macros_cover_the_static_shape():
    shape = KernelShape(ranks=2, experts=8, top_k=2, vecs=1, dtype="float16", exact=True)
    macros = dict(shape.macros())
    assert macros["DTYPE"] == "2"
    for name in macros:
        assert re.search(rf"\b{name}\b", SOURCE), name
