"""A process's place among all, whoever started it."""

import pytest

from meshwright.errors import InputError
from meshwright.run.parallel.launch.world import World, read_world

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "12007",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_NODELIST": "gpu[03-04]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "MASTER_ADDR": "job-0-0.job", "MASTER_PORT": "29500"}


def problem(environment: dict[str, str]) -> str:
    with pytest.raises(InputError) as caught:
        read_world(environment)
    return str(caught.value)


def test_without_a_launcher_a_process_is_alone() -> None:
    assert read_world({}) == World(0, 1, 0, 1, "127.0.0.1", 0)


def test_torchrun() -> None:
    assert read_world(TORCHRUN) == World(5, 8, 1, 4, "node1", 29500)


def test_slurm_meets_at_the_first_node_at_a_port_of_the_job() -> None:
    assert read_world(SLURM) == World(5, 8, 1, 4, "gpu03", 20007)


def test_addresses_given_by_hand_win_over_those_that_follow() -> None:
    world = read_world({**SLURM, "MASTER_ADDR": "10.1.2.3", "MASTER_PORT": "4000"})
    assert (world.address, world.port) == ("10.1.2.3", 4000)


def test_a_batch_script_of_slurm_is_no_task() -> None:
    batch = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}
    assert read_world(batch) == World()


def test_uneven_nodes_of_slurm_count_their_own_tasks() -> None:
    uneven = {**SLURM, "SLURM_TASKS_PER_NODE": "4,3,1", "SLURM_NODEID": "1"}
    assert read_world(uneven).local_size == 3


def test_open_mpi_on_one_machine_needs_only_a_port() -> None:
    here = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "8", "MASTER_PORT": "4000"}
    assert read_world(here) == World(5, 8, 1, 8, "127.0.0.1", 4000)


def test_open_mpi_on_several_machines_has_to_be_told_where_to_meet() -> None:
    assert "MASTER_ADDR: is not set, and there are 8 ranks" in problem(OPEN_MPI)


def test_a_pod_of_a_jobset_is_a_rank() -> None:
    pod = {**POD, "JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4"}
    assert read_world(pod) == World(2, 4, 0, 1, "job-0-0.job", 29500)


def test_a_pod_of_a_pytorchjob_is_a_rank() -> None:
    pod = {**POD, "RANK": "2", "WORLD_SIZE": "4"}
    assert read_world(pod) == World(2, 4, 0, 1, "job-0-0.job", 29500)


def test_a_pod_that_has_to_start_several_processes_says_how() -> None:
    pod = {**POD, "RANK": "1", "WORLD_SIZE": "16", "PET_NPROC_PER_NODE": "8"}
    assert "torchrun -m meshwright train JOB" in problem(pod)


def test_torchrun_in_a_pod_has_the_last_word() -> None:
    pod = {**POD, **TORCHRUN, "JOB_COMPLETION_INDEX": "1", "TORCHELASTIC_RUN_ID": "none"}
    assert read_world(pod) == World(5, 8, 1, 4, "node1", 29500)


def test_torchrun_below_srun_numbers_processes_as_they_come() -> None:
    nested = {**SLURM, **TORCHRUN, "RANK": "6", "TORCHELASTIC_RUN_ID": "x"}
    assert read_world(nested).rank == 6


def test_a_rank_that_was_set_once_for_all_tasks_contradicts_slurm() -> None:
    said = problem({**SLURM, **TORCHRUN, "RANK": "0"})
    assert "RANK: is 0, and Slurm says 5 of 8" in said


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"RANK": "8"}, "RANK: 8 is not from 0 to 7"),
        ({"LOCAL_RANK": "4"}, "LOCAL_RANK: 4 is not from 0 to 3"),
        ({"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE: 9 is not from 1 to 8"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT: 70000 is not from 1 to 65535"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE: 'many' is not a whole number"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE: is not set, and RANK is"),
        ({"RANK": ""}, "RANK: is not set, and WORLD_SIZE is"),
        ({"LOCAL_RANK": ""}, "LOCAL_RANK: is not set, and there are 8 ranks"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, str], words: str) -> None:
    assert words in problem({**TORCHRUN, **changes})
