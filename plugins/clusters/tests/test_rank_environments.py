"""The place of a rank from the variables of SLURM and MPI, and environments
that are no launcher's.
"""

from __future__ import annotations

import os

import pytest

from distcore import ConfigError
from distcore.rank_environment import export, join
from distcore_clusters.rank_environments import expand_counts, first_host

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "host1",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "5",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[09-11]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-host-123@1",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


def test_srun_is_joined_with_the_first_host_as_master() -> None:
    rank_info = join(SRUN)
    assert rank_info is not None
    assert (rank_info.rank, rank_info.size, rank_info.local_rank, rank_info.local_size) == (
        3,
        5,
        1,
        2,
    )
    assert (rank_info.launcher, rank_info.master_addr) == ("slurm", "gpu09")


@pytest.mark.parametrize("environ", [SRUN, OPEN_MPI, HYDRA], ids=["slurm", "open mpi", "hydra"])
def test_the_ranks_of_a_job_derive_one_port(environ: dict[str, str]) -> None:
    rank_name = next(name for name in environ if name.endswith(("PROCID", "_RANK")))
    places = [join({**environ, rank_name: str(rank)}) for rank in range(2)]
    ports = {rank_info.master_port for rank_info in places if rank_info}
    assert len(ports) == 1
    assert 10_000 <= (ports.pop() or 0) < 30_000


def test_steps_of_one_slurm_job_get_their_own_ports() -> None:
    ports = {
        rank_info.master_port
        for step in "01"
        if (rank_info := join({**SRUN, "SLURM_STEP_ID": step}))
    }
    assert len(ports) == 2


@pytest.mark.parametrize("environ", [OPEN_MPI, HYDRA], ids=["open mpi", "hydra"])
def test_mpi_on_one_machine_meets_on_loopback(environ: dict[str, str]) -> None:
    rank_info = join(environ)
    assert rank_info is not None
    assert (rank_info.rank, rank_info.size, rank_info.local_rank, rank_info.local_size) == (
        1,
        2,
        1,
        2,
    )
    assert (rank_info.launcher, rank_info.master_addr) == ("mpi", "127.0.0.1")


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ({**SRUN, **TORCHRUN}, "torchrun"),
        ({**OPEN_MPI, **TORCHRUN}, "torchrun"),
        ({**SRUN, **OPEN_MPI}, "mpi"),
        ({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "5"}, "slurm"),
        ({**TORCHRUN, "DISTCORE_LAUNCHER": "local"}, "local"),
    ],
    ids=[
        "torchrun in srun",
        "torchrun in mpirun",
        "mpirun in srun",
        "srun --mpi=pmi2",
        "started by distcore",
    ],
)
def test_the_innermost_launcher_is_joined(environ: dict[str, str], launcher: str) -> None:
    rank_info = join(environ)
    assert rank_info is not None
    assert rank_info.launcher == launcher


@pytest.mark.parametrize(
    "environ",
    [
        {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"},
        {**SRUN, "SLURM_STEP_ID": str(0xFFFFFFFB)},
        {**SRUN, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
    ],
    ids=["sbatch script", "batch step", "srun of one task"],
)
def test_no_rank_is_seen_where_there_is_none(environ: dict[str, str]) -> None:
    assert join(environ) is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2"},
            r"^SLURM_STEP_TASKS_PER_NODE='2': expected counts .* node 1$",
        ),
        ({**SRUN, "SLURM_PROCID": ""}, r"^SLURM_PROCID is not set, though"),
        (
            {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"},
            r"^mpirun started 4 ranks, 2 on this machine, .* MASTER_ADDR",
        ),
    ],
)
def test_an_impossible_environment_is_one_line(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        join(environ)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("environ", [SRUN, OPEN_MPI, {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4"}])
def test_an_exported_master_is_used(environ: dict[str, str]) -> None:
    rank_info = join({**environ, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "4242"})
    assert rank_info is not None
    assert (rank_info.master_addr, rank_info.master_port) == ("10.0.0.7", 4242)


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("node[01-04,7],other", "node01"),
        ("node7", "node7"),
        ("a,b", "a"),
        ("rack[2-3]n[08,11]-ib,x", "rack2n08-ib"),
        ("gpu-a[1]", "gpu-a1"),
        ("", ""),
    ],
)
def test_first_host_of_a_node_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


@pytest.mark.parametrize(
    ("counts", "numbers"), [("2(x3),1", [2, 2, 2, 1]), ("4", [4]), ("1,2", [1, 2])]
)
def test_counts_a_node(counts: str, numbers: list[int]) -> None:
    assert expand_counts(counts) == numbers


def test_a_broken_list_of_counts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'2\(y3\)' is not a list of counts"):
        expand_counts("2(y3)")


def test_an_exported_place_is_joined_again_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, "DISTCORE_LAUNCHER"):
        monkeypatch.setenv(name, "unset")
    rank_info = join(SRUN)
    assert rank_info is not None
    export(rank_info)
    assert join({**SRUN, **os.environ}) == rank_info


def test_two_mpi_jobs_over_the_same_machines_have_ports_of_their_own() -> None:
    far = {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "4", "MASTER_ADDR": "host0"}
    first, second = join(far), join({**far, "PMIX_NAMESPACE": "prterun-host-124@1"})
    assert first is not None
    assert second is not None
    assert first.master_port != second.master_port
