"""``--launcher kubernetes:KIND,image=IMAGE``: prints YAML for ``kubectl apply -f -``.

It starts nothing.

The command in every container is torchrun. Pods share one volume, for data and run folder, and get
names from a headless service. The termination grace period of a pod is the ranks' time for a
checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar

import yaml

from distcore import ConfigError, nearest
from distcore.launchers import LaunchPlan, LaunchSpec, rank_variables, refuse, train_command
from distcore_clusters.planning import fixed_nodes, need_nproc, need_out

PORT = 29500
"""Port of the store in the first pod. Each pod has its own address, so that jobs cannot meet."""
NODE = "node"
"""Name of the container, and of the replicated job in Kubeflow's torch runtime and our JobSet."""
MANAGER = "distcore.io/train"
"""Name under which a TrainJob has our changes of its runtime."""
RANK = "NODE_RANK"
"""Variable with the number of the pod."""
QUANTITIES = ("cpu", "memory", "shm")
"""Options that are amounts of a pod: what it requests, and the size of its /dev/shm."""
QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]|[KMGTPE]i)?")
SHM = "/dev/shm"
"""Memory that the processes of a pod share. A container has 64 MB by default, on which loader
workers, and ranks of one machine over NCCL, die with a bus error.
"""
Tree = dict[str, Any]


class KubernetesLauncher:
    """Writes the YAML of a plain indexed Job, a JobSet or a Kubeflow TrainJob."""

    example: ClassVar = {"value": "job,image=registry/train:1"}

    def plan(self, spec: LaunchSpec) -> LaunchPlan:
        """Return the YAML as the one file of the plan.

        Raises ConfigError without an image, ``--nproc`` or ``--out``.
        """
        kind, options = _options_of(spec.value)
        instead = "a pod is placed by its cluster"
        chosen = {"--hostfile": spec.hosts, "--include": spec.include, "--exclude": spec.exclude}
        refuse("kubernetes", chosen, instead)
        refuse(
            "kubernetes",
            {"--overwrite": spec.overwrite},
            "the run folder is in the pods' volume, where a pod that comes back would set its own"
            " run aside; name another --out",
        )
        need_out("kubernetes", spec, "a pod that was started again goes on in the run folder")
        nodes = fixed_nodes("kubernetes", spec) or 1
        nproc = need_nproc("kubernetes", spec)
        trees = KINDS[kind](spec, nodes, nproc, options)
        text = yaml.safe_dump_all(trees, sort_keys=False, width=10_000)
        files = {f"{options['name']}.yaml": text}
        return LaunchPlan(files=files, patience=spec.timeout, waits=False)

    def run(self, plan: LaunchPlan) -> int:
        """Print the YAML."""
        print("".join(plan.files.values()), end="")
        return 0


def _options_of(value: str) -> tuple[str, dict[str, str]]:
    """Return the kind and the options of ``KIND,image=IMAGE,claim=NAME,…``; raises ConfigError."""
    kind, *pairs = value.split(",")
    how = "--launcher kubernetes:KIND,image=IMAGE with KIND " + ", ".join(KINDS)
    if kind not in KINDS:
        raise ConfigError(
            f"--launcher kubernetes:{value}: no kind {kind!r}{nearest(kind, KINDS)}; expected {how}"
        )
    options = {"image": "", "claim": "distcore", "mount": "/shared", "name": "distcore"}
    options |= dict.fromkeys(QUANTITIES, "")
    for pair in pairs:
        name, _, text = pair.partition("=")
        if name not in options or not text:
            raise ConfigError(
                f"--launcher kubernetes: {pair!r}{nearest(name, options)}: expected NAME=VALUE of"
                f" {', '.join(options)}"
            )
        options[name] = text
    for name in QUANTITIES:
        if options[name] and not QUANTITY.fullmatch(options[name]):
            raise ConfigError(
                f"--launcher kubernetes: {name} = {options[name]!r}: expected a quantity of"
                " Kubernetes, such as 8, 500m or 64Gi"
            )
    if not options["image"]:
        raise ConfigError(f"--launcher kubernetes: which image do the pods run? {how}")
    return kind, options


def _job(spec: LaunchSpec, nodes: int, nproc: int, options: dict[str, str]) -> list[Tree]:
    """Return a headless service and an indexed Job whose pods it names."""
    name = options["name"]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        # Pods look for each other before they are ready.
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"job-name": name},
        },
    }
    pods = {"subdomain": name, **_pod(spec, nodes, nproc, options, f"{name}-0.{name}")}
    # When one pod fails, so do the others, and each counts.
    pod_failures = nodes * spec.max_restarts
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {**_indexed(nodes), "backoffLimit": pod_failures, "template": {"spec": pods}},
    }
    return [service, job]


def _jobset(spec: LaunchSpec, nodes: int, nproc: int, options: dict[str, str]) -> list[Tree]:
    """Return a JobSet of one Job.

    It makes the headless service, and starts all pods again if one fails.
    """
    name = options["name"]
    pods = _pod(spec, nodes, nproc, options, f"{name}-{NODE}-0-0.{name}")
    job = {**_indexed(nodes), "backoffLimit": 0, "template": {"spec": pods}}
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": name},
            "spec": {
                "network": {"enableDNSHostnames": True, "subdomain": name},
                "failurePolicy": {"maxRestarts": spec.max_restarts},
                "replicatedJobs": [{"name": NODE, "replicas": 1, "template": {"spec": job}}],
            },
        }
    ]


def _trainjob(spec: LaunchSpec, nodes: int, nproc: int, options: dict[str, str]) -> list[Tree]:
    """Return a TrainJob for Kubeflow's torch runtime.

    The runtime sets the variables from which torchrun reads nodes, ranks and address.
    """
    volumes, mounts = _volumes(options)
    trainer = {
        "image": options["image"],
        "command": ["torchrun"],
        "args": ["--no-python", *_program(spec)],
        "numNodes": nodes,
        "numProcPerNode": nproc,
        "env": _environment(spec),
        "resourcesPerNode": _resources(spec, nproc, options),
    }
    pod = {
        "terminationGracePeriodSeconds": int(spec.timeout),
        "containers": [{"name": NODE, "volumeMounts": mounts}],
        "volumes": volumes,
    }
    job = {"template": {"spec": pod}}
    jobset = {"replicatedJobs": [{"name": NODE, "template": {"spec": job}}]}
    patch = {"manager": MANAGER, "trainingRuntimeSpec": {"template": {"spec": jobset}}}
    return [
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {"name": options["name"]},
            "spec": {
                "runtimeRef": {"name": "torch-distributed"},
                "trainer": {key: value for key, value in trainer.items() if value},
                "runtimePatches": [patch],
            },
        }
    ]


def _indexed(nodes: int) -> Tree:
    """Return the fields of a Job with ``nodes`` numbered pods at once."""
    return {"completionMode": "Indexed", "completions": nodes, "parallelism": nodes}


def _pod(
    spec: LaunchSpec,
    nodes: int,
    nproc: int,
    options: dict[str, str],
    master: str,
) -> Tree:
    """Return the spec of a pod; ``master`` is the address of the first one."""
    volumes, mounts = _volumes(options)
    index = {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
    agent = ["torchrun", "--nnodes", str(nodes), "--node-rank", f"$({RANK})"]
    agent += ["--nproc-per-node", str(nproc)]
    agent += ["--master-addr", master, "--master-port", str(PORT)]
    container = {
        "name": NODE,
        "image": options["image"],
        "workingDir": options["mount"],
        "command": [*agent, "--no-python", *_program(spec)],
        "env": [{"name": RANK, "valueFrom": {"fieldRef": index}}, *_environment(spec)],
        "resources": _resources(spec, nproc, options),
        "volumeMounts": mounts,
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(spec.timeout),
        "containers": [{key: value for key, value in container.items() if value}],
        "volumes": volumes,
    }


def _program(spec: LaunchSpec) -> list[str]:
    """Return the command of a rank: ``distcore``, with which a restarted pod resumes."""
    # Without the interpreter: an image has its own.
    _python, _m, *program = train_command(spec)
    resume = [] if spec.resume else ["--resume", "auto"]
    return [*program, *resume]


def _environment(spec: LaunchSpec) -> list[Tree]:
    """Return the variables of every rank, as a container has them."""
    variables = rank_variables(spec)
    return [{"name": name, "value": value} for name, value in variables.items()]


def _resources(spec: LaunchSpec, nproc: int, options: dict[str, str]) -> Tree:
    """Return what a pod requests, and the limit of its memory and GPUs; empty for nothing."""
    requests = {name: options[name] for name in ("cpu", "memory") if options[name]}
    # Not of CPU: a limit would throttle ranks in the midst of a collective.
    limits = {"memory": options["memory"]} if options["memory"] else {}
    if spec.device not in ("cpu", "auto"):
        limits["nvidia.com/gpu"] = str(nproc)
    resources = {"requests": requests, "limits": limits}
    return {kind: amounts for kind, amounts in resources.items() if amounts}


def _volumes(options: dict[str, str]) -> tuple[list[Tree], list[Tree]]:
    """Return the volume that all pods share and a pod's own memory, and where they are mounted."""
    claim = {"claimName": options["claim"]}
    in_memory = {"medium": "Memory"}
    if options["shm"]:
        in_memory["sizeLimit"] = options["shm"]
    volumes: list[Tree] = [
        {"name": "shared", "persistentVolumeClaim": claim},
        {"name": "shm", "emptyDir": in_memory},
    ]
    mounts: list[Tree] = [
        {"name": "shared", "mountPath": options["mount"]},
        {"name": "shm", "mountPath": SHM},
    ]
    return volumes, mounts


KINDS: dict[str, Callable[[LaunchSpec, int, int, dict[str, str]], list[Tree]]] = {
    "job": _job,
    "jobset": _jobset,
    "trainjob": _trainjob,
}
