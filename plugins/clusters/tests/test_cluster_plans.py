"""The commands that each launcher would start, word for word, and its
refusals before anything starts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import yaml

from distcore import ConfigError
from distcore.launchers import Here, Host, Launcher, LaunchPlan, LaunchSpec
from distcore_clusters.kubernetes import KubernetesLauncher
from distcore_clusters.mpi import MpiLauncher
from distcore_clusters.planning import limited
from distcore_clusters.slurm import PREEMPTED, SlurmLauncher
from distcore_clusters.ssh import SshLauncher
from distcore_clusters.torchrun import TorchrunLauncher

HERE = Here(folder="/work dir", python="/py", job="job-7", environment={"NCCL_DEBUG": "INFO"})
HOSTS = (Host(name="host0", slots=2), Host(name="host1", slots=2, chosen=(3, 1)))
SPEC = LaunchSpec(train=("c.yaml", "--lr", "0.1"), environment={"A": "b c"}, here=HERE)
RANK = "train c.yaml --lr 0.1 --set nproc=auto"


def lines(launcher: Launcher, **asked: Any) -> list[str]:
    return str(launcher.plan(replace(SPEC, **asked))).splitlines()


def test_torchrun_is_an_agent_that_meets_the_others() -> None:
    assert lines(TorchrunLauncher(), value="host0:29500", nodes=(2, 2), nproc=4) == [
        "TORCH_CPP_LOG_LEVEL=ERROR A='b c' /py -m distcore_clusters.agent --nnodes 2"
        " --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint host0:29500 --rdzv-id distcore"
        " --rdzv-conf last_call_timeout=10 --max-restarts 0 --shutdown-timeout 600 --module"
        f" distcore {RANK}"
    ]


def test_elastic_torchrun_has_a_range_of_nodes_and_restarts_by_itself() -> None:
    asked = {
        "nodes": (1, 3),
        "nproc": 2,
        "out": "o",
        "resume": "auto",
        "global_batch_size": 12,
        "max_restarts": 5,
    }
    (line,) = lines(TorchrunLauncher(), value="host0:1", **asked)
    assert "--nnodes 1:3 " in line
    assert "--max-restarts 5 " in line
    assert line.endswith(f"{RANK} --set max_restarts=0")


def test_ssh_starts_an_agent_on_each_machine_of_the_hostfile() -> None:
    first, second = SshLauncher().plan(replace(SPEC, hosts=HOSTS, log_dir="/logs")).commands
    assert first.words[:-1] == (
        "ssh",
        "-o",
        "BatchMode=yes",
        "-o",
        "ServerAliveInterval=15",
        "-o",
        "ServerAliveCountMax=3",
        "host0",
    )
    assert (
        first.words[-1]
        == "cd '/work dir' && exec env TORCH_CPP_LOG_LEVEL=ERROR NCCL_DEBUG=INFO A='b c'"
        " DISTCORE_LOG_DIR=/logs /py -m distcore_clusters.agent --lifeline --nnodes 2"
        " --node-rank 0 --nproc-per-node 2 --master-addr host0 --master-port 14042"
        f" --shutdown-timeout 600 --module distcore {RANK}"
    )
    assert second.host == "host1"
    assert SshLauncher().plan(replace(SPEC, hosts=HOSTS, value="2222")).commands[0].words[7:10] == (
        "-p",
        "2222",
        "host0",
    )
    assert (
        " CUDA_VISIBLE_DEVICES=3,1 /py -m distcore_clusters.agent --lifeline --nnodes 2"
        " --node-rank 1 " in (second.words[-1])
    )


def test_a_sweep_on_slurm_is_an_array_and_inside_an_allocation_one_run_after_the_other() -> None:
    runs = {
        name: replace(SPEC, train=(f"{name}.yaml",), nproc=2, out=name) for name in ("lr=1", "lr=2")
    }
    plan = SlurmLauncher().plan_sweep(runs)
    assert plan is not None
    assert not plan.waits
    script = str(plan).splitlines()
    assert "#SBATCH --array=0-1" in script
    start = script.index("case $SLURM_ARRAY_TASK_ID in")
    command = "srun --kill-on-bad-exit=1 /py -m distcore train"
    assert script[start + 1 : start + 5] == [
        f"0) {command} lr=1.yaml --set nproc=auto --resume auto ;;",
        f"1) {command} lr=2.yaml --set nproc=auto --resume auto ;;",
        "esac",
        PREEMPTED[0],
    ]
    inside = {name: replace(spec, here=replace(HERE, inside="7")) for name, spec in runs.items()}
    assert SlurmLauncher().plan_sweep(inside) is None
    assert SlurmLauncher().plan(inside["lr=1"]).waits
    with pytest.raises(ConfigError, match="say how many ranks each machine gets"):
        SlurmLauncher().plan_sweep({name: replace(spec, nproc=None) for name, spec in runs.items()})


def test_slurm_submits_a_script_that_goes_on_after_a_requeue() -> None:
    asked = {
        "nodes": (2, 2),
        "nproc": 4,
        "out": "o",
        "device": "cuda",
        "value": "gpu",
        "include": "n1@n2",
    }
    assert lines(SlurmLauncher(), log_dir="/logs", **asked) == [
        "# /logs/job-7.sh",
        "#!/bin/bash",
        "#SBATCH --job-name=job-7",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=4",
        "#SBATCH --gpus-per-node=4",
        "#SBATCH --partition=gpu",
        "#SBATCH --nodelist=n1,n2",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --signal=TERM@120",
        "#SBATCH --chdir='/work dir'",
        "#SBATCH --output=/logs/%x-%j.log",
        "trap : TERM  # the step gets it, too, and saves a checkpoint",
        "export NCCL_DEBUG=INFO",
        "export A='b c'",
        "export DISTCORE_LOG_DIR=/logs",
        f"srun --kill-on-bad-exit=1 /py -m distcore {RANK} --resume auto",
        *PREEMPTED,
        "",
        "sbatch /logs/job-7.sh",
    ]


def test_slurm_starts_a_step_inside_an_allocation() -> None:
    assert lines(SlurmLauncher(), nodes=(2, 2), nproc=4, here=replace(HERE, inside="77")) == [
        f"A='b c' srun --kill-on-bad-exit=1 --nodes=2 --ntasks-per-node=4 /py -m distcore {RANK}"
    ]


def test_mpi_has_an_address_and_a_port_of_the_jobs_own() -> None:
    hosts = tuple(replace(host, chosen=None) for host in HOSTS)
    assert lines(MpiLauncher(), hosts=hosts) == [
        "mpirun -np 4 --bind-to none --host host0:2,host1:2 -x NCCL_DEBUG=INFO -x 'A=b c' -x"
        f" MASTER_ADDR=host0 -x MASTER_PORT=14042 /py -m distcore {RANK}"
    ]
    assert lines(MpiLauncher(), hosts=hosts, value="mpich") == [
        "mpiexec.hydra -n 4 -bind-to none -hosts host0:2,host1:2 -genv NCCL_DEBUG INFO -genv A 'b"
        f" c' -genv MASTER_ADDR host0 -genv MASTER_PORT 14042 /py -m distcore {RANK}"
    ]
    other = lines(MpiLauncher(), hosts=hosts, here=replace(HERE, job="job-8"))
    assert "MASTER_PORT=10571 " in other[0]


def test_mpi_on_one_machine_meets_on_loopback() -> None:
    assert "mpirun -np 2 --bind-to none -x " in (line := lines(MpiLauncher(), nproc=2)[0])
    assert "MASTER_ADDR=127.0.0.1" in line


KUBERNETES: dict[str, Any] = {
    "nodes": (2, 2),
    "nproc": 4,
    "out": "o",
    "device": "cuda",
    "max_restarts": 3,
}


def trees(kind: str, more: str = "") -> list[dict[str, Any]]:
    plan = KubernetesLauncher().plan(
        replace(SPEC, value=f"{kind},image=me/it:1,claim=disk{more}", **KUBERNETES)
    )
    assert list(plan.files) == ["distcore.yaml"]
    return list(yaml.safe_load_all(plan.files["distcore.yaml"]))


def test_a_kubernetes_job_runs_torchrun_in_pods_that_a_service_names() -> None:
    service, job = trees("job")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert job["spec"]["completionMode"] == "Indexed"
    assert (
        job["spec"]["completions"],
        job["spec"]["parallelism"],
        job["spec"]["backoffLimit"],
    ) == (2, 2, 6)
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    assert pod["terminationGracePeriodSeconds"] == 600
    (container,) = pod["containers"]
    assert (
        " ".join(container["command"])
        == "torchrun --nnodes 2 --node-rank $(NODE_RANK) --nproc-per-node 4 --master-addr"
        f" distcore-0.distcore --master-port 29500 --no-python distcore {RANK} --set"
        " max_restarts=0 --resume auto"
    )
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "4"}}
    assert container["volumeMounts"] == [
        {"name": "shared", "mountPath": "/shared"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    assert pod["volumes"] == [
        {"name": "shared", "persistentVolumeClaim": {"claimName": "disk"}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
def test_a_pod_requests_what_it_is_told_to_and_has_shared_memory(kind: str) -> None:
    tree = trees(kind, ",cpu=7500m,memory=64Gi,shm=16Gi")[-1]["spec"]
    if kind == "trainjob":
        resources = tree["trainer"]["resourcesPerNode"]
        spec = tree["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]
    else:
        spec = tree
    if kind != "job":
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    if kind != "trainjob":
        resources = container["resources"]
    assert resources == {
        "requests": {"cpu": "7500m", "memory": "64Gi"},
        "limits": {"memory": "64Gi", "nvidia.com/gpu": "4"},
    }
    assert pod["volumes"][1] == {
        "name": "shm",
        "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"},
    }
    assert container["volumeMounts"][1] == {"name": "shm", "mountPath": "/dev/shm"}


def test_a_jobset_restarts_all_pods_together() -> None:
    (jobset,) = trees("jobset")
    assert jobset["spec"]["failurePolicy"] == {"maxRestarts": 3}
    (job,) = jobset["spec"]["replicatedJobs"]
    assert job["template"]["spec"]["backoffLimit"] == 0
    words = job["template"]["spec"]["template"]["spec"]["containers"][0]["command"]
    assert words[words.index("--master-addr") + 1] == "distcore-node-0-0.distcore"


def test_a_trainjob_leaves_nodes_and_address_to_the_operator() -> None:
    (job,) = trees("trainjob")
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 4)
    assert trainer["command"] == ["torchrun"]
    assert trainer["args"][:4] == ["--no-python", "distcore", "train", "c.yaml"]


@pytest.mark.programs
def test_the_job_is_one_by_the_models_of_the_kubernetes_client() -> None:
    kubernetes = pytest.importorskip("kubernetes", reason="pip install kubernetes, the client")
    api = kubernetes.client.ApiClient()
    for tree, model in zip(
        trees("job"), (kubernetes.client.V1Service, kubernetes.client.V1Job), strict=True
    ):
        assert api.sanitize_for_serialization(_read(kubernetes.client, model, tree)) == tree


def _read(models: Any, kind: Any, tree: Any) -> Any:
    """Build ``kind``, a model or a type's name, from a tree; a key that the model does not
    have is an error.
    """
    if isinstance(kind, str):
        generic = kind.lower()  # releases of the client write List[str] and list[str]
        if generic.startswith("list["):
            return [_read(models, kind[5:-1], item) for item in tree]
        if generic.startswith("dict[") or kind in ("str", "int", "bool"):
            return tree
        kind = getattr(models, kind)
    names = {key: name for name, key in kind.attribute_map.items()}
    given = {
        names[key]: _read(models, kind.openapi_types[names[key]], value)
        for key, value in tree.items()
    }
    return kind(**given)


REFUSED: list[tuple[Launcher, dict[str, Any], str]] = [
    (
        TorchrunLauncher(),
        {},
        r"^--launcher torchrun: say how many ranks each machine gets: --nproc N$",
    ),
    (TorchrunLauncher(), {"nproc": 1, "nodes": (2, 2)}, r"say where the nodes meet"),
    (
        TorchrunLauncher(),
        {"nproc": 1, "value": "host0"},
        r"^--launcher torchrun:host0: expected torchrun:HOST:PORT$",
    ),
    (
        TorchrunLauncher(),
        {"nproc": 1, "max_restarts": 1},
        r"^--max-restarts 1 starts ranks again, .*: add --out DIR",
    ),
    (
        TorchrunLauncher(),
        {
            "nproc": 2,
            "value": "h:1",
            "nodes": (1, 3),
            "out": "o",
            "resume": "auto",
            "global_batch_size": 32,
        },
        (
            r"^--nodes 1:3: global_batch_size = 32 cannot be shared by 3 \* 2 ranks; choose a"
            r" number that 2 and 4 and 6"
        ),
    ),
    (
        SshLauncher(),
        {"hosts": HOSTS, "value": "host0"},
        r"^--launcher ssh:host0: expected ssh:PORT, a number from 1",
    ),
    (SshLauncher(), {}, r"^--launcher ssh: on which machines\? --hostfile FILE"),
    (
        SshLauncher(),
        {"hosts": HOSTS, "nodes": (1, 2)},
        r"^--nodes 1:2: --launcher ssh starts a fixed number; --l",
    ),
    (
        SshLauncher(),
        {"hosts": HOSTS, "nodes": (3, 3)},
        r"^--nodes 3: there are 2 machines: host0, host1$",
    ),
    (SshLauncher(), {"hosts": HOSTS, "nproc": 3}, r"^--nproc 3: host0 has 2 slot\(s\)$"),
    (
        SshLauncher(),
        {"hosts": HOSTS, "max_restarts": 1},
        r"^--launcher ssh takes no --max-restarts 1: start it again",
    ),
    (
        SlurmLauncher(),
        {"nproc": 1},
        r"^--launcher slurm: a job that was requeued goes on in its run folder: add",
    ),
    (
        SlurmLauncher(),
        {"nproc": 1, "out": "o", "here": replace(HERE, out_exists=True)},
        r"^out = 'o': holds another",
    ),
    (
        KubernetesLauncher(),
        {"nproc": 1, "out": "o", "value": "job,image=i", "overwrite": True},
        r"^--launcher kubernetes takes no --overwrite: the run folder is in the pods' volume",
    ),
    (
        SlurmLauncher(),
        {"nproc": 1, "out": "o", "hosts": HOSTS},
        r"^--launcher slurm takes no --hostfile: SLURM has",
    ),
    (
        SlurmLauncher(),
        {"nproc": 1, "out": "o", "include": "n1:0"},
        r"^--launcher slurm cannot choose GPUs: name whole",
    ),
    (MpiLauncher(), {"value": "mpi"}, r"^--launcher mpi:mpi: expected openmpi or mpich"),
    (
        MpiLauncher(),
        {"nodes": (2, 2), "nproc": 1},
        r"^--launcher mpi --nodes 2: name the machines: --hostfile FILE$",
    ),
    (
        KubernetesLauncher(),
        {"value": "jobs,image=i"},
        r"no kind 'jobs' \(did you mean 'job'\?\); expected",
    ),
    (
        KubernetesLauncher(),
        {"value": "job"},
        r"^--launcher kubernetes: which image do the pods run\?",
    ),
    (
        KubernetesLauncher(),
        {"value": "job,image=i,memory=64GB", "nproc": 1, "out": "o"},
        r"^--launcher kubernetes: memory = '64GB': expected a quantity of Kubernetes, such as 8",
    ),
    (
        KubernetesLauncher(),
        {"value": "job,imag=i"},
        r"'imag=i' \(did you mean 'image'\?\): expected NAME=VALUE of ",
    ),
]


@pytest.mark.parametrize(
    ("launcher", "asked", "message"), REFUSED, ids=[message for _, _, message in REFUSED]
)
def test_a_job_that_a_launcher_cannot_start_is_one_line(
    launcher: Launcher, asked: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        launcher.plan(replace(SPEC, **asked))
    assert "\n" not in str(caught.value)


def test_a_program_that_is_missing_is_found_before_anything_is_written(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    plan: LaunchPlan = SlurmLauncher().plan(
        replace(SPEC, nproc=1, out="o", log_dir=str(tmp_path / "logs"))
    )
    with pytest.raises(
        ConfigError, match=r"^no program 'sbatch' on PATH; --dry-run prints what would be started$"
    ):
        SlurmLauncher().run(plan)
    assert not (tmp_path / "logs").exists()


def test_nodes_and_nproc_take_the_first_ones() -> None:
    hosts = (Host(name="host0", slots=2, chosen=(3, 1)), Host(name="host1", slots=2))
    assert limited(hosts, 1, (1, 1)) == (Host(name="host0", slots=1, chosen=(3,)),)
