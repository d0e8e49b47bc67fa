"""The same network in plain Python: slow and obvious, the oracle of the compiled engine.

Objects instead of rows, `heapq` with all events in it, real timers for DCQCN, sets of packet numbers instead of bit
rings, lists of flows instead of links between rows. It must agree with `kernel` in every packet, mark, pause and
completion, to the picosecond; tests compare the two on random small scenarios. What it shares with the engine are
what both are given (`routes`, `inputs`) and the rules that make ties unambiguous: events at one instant go by source
number (see `kernel`; DCQCN ticks before all), and each event's work is done in the stages kick, ctl, pfc, wake, last
come first served.

    parts, network      the records, and all state
    loop                events and stages; which queue of a port goes first
    switch, routing     buffer, marks, drops; which port
    pfc                 pauses and the watchdog
    sender, receiver    the two halves of a queue pair
    rates               DCQCN
    phases              when flows start
"""

from bywash.fabric.naive.loop import run_naive

__all__ = ["run_naive"]
