import pytest

from bywash.errors import ConfigError
from bywash.launch.slurm import first_node, slurm_environment

TASK = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


def test_a_task_of_a_step_is_a_rank():
    found = slurm_environment(TASK)
    assert found == {
        "RANK": "9",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": str(20_000 + (4711 * 7 + 2) % 10_000),
    }


def test_all_tasks_of_a_step_meet_at_one_place_and_two_steps_do_not():
    places = {
        (found["MASTER_ADDR"], found["MASTER_PORT"])
        for rank in range(16)
        for found in [slurm_environment(TASK | {"SLURM_PROCID": str(rank)})]
    }
    assert len(places) == 1
    assert slurm_environment(TASK | {"SLURM_STEP_ID": "3"})["MASTER_PORT"] not in {port for _, port in places}


def test_a_batch_script_and_a_single_task_are_no_ranks():
    batch = {name: value for name, value in TASK.items() if not name.startswith("SLURM_STEP")}
    assert slurm_environment(batch | {"SLURM_NTASKS": "16", "SLURM_PROCID": "0"}) == {}
    assert slurm_environment(TASK | {"SLURM_STEP_NUM_TASKS": "1"}) == {}
    assert slurm_environment({}) == {}


def test_what_the_user_set_stays():
    found = slurm_environment(TASK | {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "1234", "SLURM_STEP_NODELIST": "[["})
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.9", "1234")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu[03-05,9],cpu1", "gpu03"),
        ("a[7]", "a7"),
        ("rack-1.x[002-004]-ib", "rack-1.x002-ib"),
    ],
)
def test_the_first_of_a_node_list(nodes, first):
    assert first_node(nodes) == first


@pytest.mark.parametrize("nodes", ["", "[1-2]", "a[", "a b"])
def test_no_node_list(nodes):
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        first_node(nodes)
