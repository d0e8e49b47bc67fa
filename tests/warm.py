"""`python -m tests.warm`: compile what numba compiles, which takes minutes on a slow machine, and keep it on disk.

Run before the tests, so that no test's time limit pays for it and two processes of tests do not do it twice.
"""

from concurrent.futures import ProcessPoolExecutor, wait
from multiprocessing import get_context


def fabric():
    """The packet simulator, with and without what only some scenarios use."""
    from bywash.fabric import simulate
    from tests.fabric.scenarios import random_scenario

    for lean in (True, False):
        simulate(random_scenario(40_000, lean=lean, packets=100))


def balance():
    """The planner of a step: a few cases reach every kind of argument."""
    import numpy as np

    from bywash.balance import plan_step
    from tests.balance.plan_cases import draw_case

    for seed in range(5):
        case = draw_case(np.random.default_rng(seed))
        plan_step(case.counts[0], case.placement)
        plan_step(case.counts[0], case.placement, case.limits, case.directory)


if __name__ == "__main__":
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for done in wait([pool.submit(fabric), pool.submit(balance)]).done:
            done.result()
