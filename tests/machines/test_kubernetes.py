"""The YAML of ``--launcher kubernetes``: by the models of the published clients, and as
pods would run it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import machine_job as job
import pytest
import yaml
from machines import PATIENCE, Machine

PYTHON = Path(__file__).parents[2] / "build/machines/bin/python"
"""The interpreter of an environment of its own, with what is not installed beside distcore."""
MODELS = """
import json, sys
from kubeflow_trainer_api import models
for name, text in json.load(sys.stdin):
    tree = json.loads(text)
    model = getattr(models, name).from_dict(tree)
    print(json.dumps([tree, model.to_dict()]))
"""


def trees(kind: str, folder: Path, flags: str = "") -> list[dict[str, Any]]:
    options = f"kubernetes:{kind},image=me/distcore:1,mount={folder}"
    words = (
        f"-m distcore train {job.FLAGS} --launcher {options} --nodes 2 --nproc 1 --strategy ddp"
        f" --out {folder}/run --max-steps 12 {flags}"
    )
    done = subprocess.run(
        [sys.executable, *words.split()], cwd=folder, capture_output=True, text=True, check=True
    )
    return list(yaml.safe_load_all(done.stdout))


def test_jobset_and_trainjob_are_such_by_the_models_of_kubeflow(tmp_path: Path) -> None:
    if not PYTHON.exists():
        pytest.skip(f"no {PYTHON}: make machines makes it")
    flags = "--set device=cuda --max-restarts 2"
    (jobset,), (trainjob,) = trees("jobset", tmp_path, flags), trees("trainjob", tmp_path, flags)
    asked = [
        ("JobsetV1alpha2JobSetSpec", json.dumps(jobset["spec"])),
        ("TrainerV1alpha1TrainJob", json.dumps(trainjob)),
    ]
    done = subprocess.run(
        [PYTHON, "-c", MODELS], input=json.dumps(asked), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        tree, read = json.loads(line)
        assert is_within(tree, read), (tree, read)


def is_within(tree: Any, read: Any) -> bool:
    """Return True if a model kept all that it was given; it adds defaults, and drops what
    it does not know.
    """
    if isinstance(tree, dict):
        return isinstance(read, dict) and all(
            key in read and is_within(tree[key], read[key]) for key in tree
        )
    if isinstance(tree, list):
        return len(tree) == len(read) and all(map(is_within, tree, read))
    return bool(tree == read)


def pods(kind: str, folder: Path) -> list[tuple[list[str], dict[str, str]]]:
    """Return command and variables of the container of each pod, as the cluster
    would fill them in.
    """
    tree = trees(kind, folder)[-1]
    if kind == "trainjob":
        trainer = tree["spec"]["trainer"]
        nodes, each = trainer["numNodes"], trainer["numProcPerNode"]
        operator = {
            "PET_NNODES": nodes,
            "PET_NPROC_PER_NODE": each,
            "PET_MASTER_ADDR": "distcore-node-0-0.distcore",
        }
        given = {
            **operator,
            "PET_MASTER_PORT": 29400,
            **{pair["name"]: pair["value"] for pair in trainer.get("env", [])},
        }
        texts = {name: str(value) for name, value in given.items()}
        return [
            ([*trainer["command"], *trainer["args"]], {**texts, "PET_NODE_RANK": str(n)})
            for n in range(nodes)
        ]
    spec = (
        tree["spec"]["replicatedJobs"][0]["template"]["spec"] if kind == "jobset" else tree["spec"]
    )
    (container,) = spec["template"]["spec"]["containers"]
    commands = []
    for index in range(spec["completions"]):
        given = {pair["name"]: pair.get("value", str(index)) for pair in container["env"]}
        words = container["command"]
        for name, value in given.items():
            words = [word.replace(f"$({name})", value) for word in words]
        commands.append((words, given))
    return commands


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
def test_pods_have_the_losses_of_one_process(
    kind: str, nodes: tuple[Machine, ...], single: Path, tmp_path: Path
) -> None:
    begun = [
        node.start(*words, folder=tmp_path, environment=given)
        for node, (words, given) in zip(nodes, pods(kind, tmp_path), strict=True)
    ]
    said = [pod.communicate(timeout=PATIENCE)[0] for pod in begun]
    assert [pod.returncode for pod in begun] == [0, 0], said
    job.is_same(tmp_path / "run", single, 12)
