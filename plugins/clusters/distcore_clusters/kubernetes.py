"""``--launcher kubernetes:KIND,image=IMAGE``: prints YAML for ``kubectl apply -f
-``, and starts nothing.

The command in every container is torchrun. Pods share one volume, for data and run folder, and get
names from a headless service. The termination grace period of a pod is the ranks' time for a
checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import yaml

from distcore import ConfigError, nearest
from distcore.launchers import LaunchPlan, LaunchSpec, rank_variables, refuse, train_command
from distcore_clusters.planning import fixed_nodes, need_nproc, need_out

PORT = 29500
"""Port of the store in the first pod; each pod has an address of its own, so
that jobs cannot meet.
"""
NODE = "node"
"""Name of the container, and of the replicated job that Kubeflow's runtime for torch
and this JobSet have.
"""
MANAGER = "distcore.io/train"
"""Name under which a TrainJob has our changes of its runtime."""
RANK = "NODE_RANK"
"""Variable with the number of the pod."""
Tree = dict[str, Any]


class KubernetesLauncher:
    """Writes the YAML of a plain indexed Job, a JobSet or a Kubeflow TrainJob."""

    example: ClassVar = {"value": "job,image=registry/train:1"}

    def plan(self, spec: LaunchSpec) -> LaunchPlan:
        """Return the YAML as the one file of the plan; raises ConfigError without an image,
        a number and ``--out``.
        """
        kind, options = _options_of(spec.value)
        instead = "a pod is placed by its cluster"
        chosen = {"--hostfile": spec.hosts, "--include": spec.include, "--exclude": spec.exclude}
        refuse("kubernetes", chosen, instead)
        need_out("kubernetes", spec, "a pod that was started again goes on in the run folder")
        nodes, nproc = fixed_nodes("kubernetes", spec) or 1, need_nproc("kubernetes", spec)
        trees = KINDS[kind](spec, nodes, nproc, options)
        text = yaml.safe_dump_all(trees, sort_keys=False, width=10_000)
        return LaunchPlan(
            files={f"{options['name']}.yaml": text}, patience=spec.timeout, waits=False
        )

    def run(self, plan: LaunchPlan) -> int:
        """Print the YAML."""
        print("".join(plan.files.values()), end="")
        return 0


def _options_of(value: str) -> tuple[str, dict[str, str]]:
    """Return the kind and the options of ``KIND,image=IMAGE,claim=NAME,mount=PATH,name=NAME``."""
    kind, *pairs = value.split(",")
    how = "--launcher kubernetes:KIND,image=IMAGE with KIND " + ", ".join(KINDS)
    if kind not in KINDS:
        raise ConfigError(
            f"--launcher kubernetes:{value}: no kind {kind!r}{nearest(kind, KINDS)}; expected {how}"
        )
    options = {"image": "", "claim": "distcore", "mount": "/shared", "name": "distcore"}
    for pair in pairs:
        name, _, given = pair.partition("=")
        if name not in options or not given:
            known = ", ".join(options)
            raise ConfigError(
                f"--launcher kubernetes: {pair!r}{nearest(name, options)}: expected NAME=VALUE of"
                f" {known}"
            )
        options[name] = given
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
        # Not ready yet is when pods look for each other.
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"job-name": name},
        },
    }
    pods = {"subdomain": name, **_pod(spec, nodes, nproc, options, f"{name}-0.{name}")}
    again = nodes * spec.max_restarts  # when one pod fails, so do the others
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name},
        "spec": {**_indexed(nodes), "backoffLimit": again, "template": {"spec": pods}},
    }
    return [service, job]


def _jobset(spec: LaunchSpec, nodes: int, nproc: int, options: dict[str, str]) -> list[Tree]:
    """Return a JobSet of one Job; it makes the headless service, and starts all pods
    again if one fails.
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
    """Return a TrainJob for Kubeflow's torch runtime, which tells torchrun nodes, ranks
    and address by variables.
    """
    volumes, mounts = _volume(options)
    trainer = {
        "image": options["image"],
        "command": ["torchrun"],
        "args": ["--no-python", *_program(spec)],
        "numNodes": nodes,
        "numProcPerNode": nproc,
        "env": [{"name": name, "value": value} for name, value in rank_variables(spec).items()],
        "resourcesPerNode": _gpus(spec, nproc),
    }
    pod = {
        "terminationGracePeriodSeconds": int(spec.timeout),
        "containers": [{"name": NODE, "volumeMounts": mounts}],
        "volumes": volumes,
    }
    patch = {"replicatedJobs": [{"name": NODE, "template": {"spec": {"template": {"spec": pod}}}}]}
    return [
        {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": {"name": options["name"]},
            "spec": {
                "runtimeRef": {"name": "torch-distributed"},
                "trainer": {key: value for key, value in trainer.items() if value},
                "runtimePatches": [
                    {"manager": MANAGER, "trainingRuntimeSpec": {"template": {"spec": patch}}}
                ],
            },
        }
    ]


def _indexed(nodes: int) -> Tree:
    return {"completionMode": "Indexed", "completions": nodes, "parallelism": nodes}


def _pod(spec: LaunchSpec, nodes: int, nproc: int, options: dict[str, str], master: str) -> Tree:
    volumes, mounts = _volume(options)
    index = {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}
    agent = (
        *(
            "torchrun",
            "--nnodes",
            str(nodes),
            "--node-rank",
            f"$({RANK})",
            "--nproc-per-node",
            str(nproc),
        ),
        *("--master-addr", master, "--master-port", str(PORT)),
    )
    container = {
        "name": NODE,
        "image": options["image"],
        "workingDir": options["mount"],
        "command": [*agent, "--no-python", *_program(spec)],
        "env": [
            {"name": RANK, "valueFrom": {"fieldRef": index}},
            *({"name": name, "value": value} for name, value in rank_variables(spec).items()),
        ],
        "resources": _gpus(spec, nproc),
        "volumeMounts": mounts,
    }
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(spec.timeout),
        "containers": [{key: value for key, value in container.items() if value}],
        "volumes": volumes,
    }


def _program(spec: LaunchSpec) -> list[str]:
    """Return the command of a rank, ``distcore`` with arguments that
    make a restarted pod resume.
    """
    _python, _m, *program = train_command(spec)  # an image has an interpreter of its own
    return [*program, *(() if spec.resume else ("--resume", "auto"))]


def _gpus(spec: LaunchSpec, nproc: int) -> Tree:
    return {"limits": {"nvidia.com/gpu": str(nproc)}} if spec.device not in ("cpu", "auto") else {}


def _volume(options: dict[str, str]) -> tuple[list[Tree], list[Tree]]:
    """Return the volume that all pods share, and where it is mounted."""
    volume = {"name": "shared", "persistentVolumeClaim": {"claimName": options["claim"]}}
    return [volume], [{"name": "shared", "mountPath": options["mount"]}]


KINDS: dict[str, Callable[[LaunchSpec, int, int, dict[str, str]], list[Tree]]] = {
    "job": _job,
    "jobset": _jobset,
    "trainjob": _trainjob,
}
