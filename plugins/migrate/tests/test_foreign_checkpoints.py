"""Checkpoints of real trainers go on under distcore with the losses that the trainers
themselves go on with.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign_runs as runs
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_saver

from distcore import CheckpointError, ConfigError, launch, load_config, train
from distcore.checkpoint import Checkpoint
from distcore.cli.main import main
from distcore.jobs import train as jobs
from distcore.plugin.batching.permutation import STORED_ROWS
from distcore.rank_environment import join
from distcore_migrate.foreign import reader
from distcore_migrate.foreign.model_names import ModelNames

pytestmark = [pytest.mark.ranks, pytest.mark.programs]
NEAR = 1e-5


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config file of a job that every trainer here can train."""
    return runs.job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def accelerated(job: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    """A folder that Accelerate saved, and its losses."""
    folder = tmp_path_factory.mktemp("accelerate") / "state"
    return folder, launch(runs.accelerate, job, folder, nproc=1)[0]


def in_rank(job: Path, out: Path, stage: int) -> list[float]:
    """Train by DeepSpeed as one of the launched ranks."""
    rank = join()
    assert rank is not None
    return runs.deepspeed(job, out, stage, rank.rank, rank.size)


def goes_on(job: Path, folder: Path, losses: list[float], run: Path, **changes: Any) -> None:
    """Resume from the checkpoint, and compare every further loss."""
    told = {"out": str(run), "resume": str(folder), "checkpoints.keep_last": 9}
    train(load_config(str(job), told | changes))
    Checkpoint(run / f"checkpoints/step-{runs.SAVED:08d}").verify()
    assert len(losses) == runs.STEPS
    assert runs.logged(run) == pytest.approx(losses[runs.SAVED :], abs=NEAR)


@pytest.mark.parametrize("changes", [{}, {"strategy": "fsdp", "nproc": 2}], ids=["single", "fsdp"])
def test_a_run_of_accelerate_goes_on(
    job: Path, accelerated: tuple[Path, list[float]], tmp_path: Path, changes: dict[str, Any]
) -> None:
    goes_on(job, *accelerated, tmp_path / "run", **changes)


@pytest.mark.parametrize(("lr", "schedule"), [(runs.LR, "linear"), (5e-5, "polynomial")])
def test_a_run_of_the_trainer_goes_on(job: Path, tmp_path: Path, lr: float, schedule: str) -> None:
    losses = launch(runs.trainer, job, tmp_path / "hf", lr, schedule, nproc=1)[0]
    changes = {"lr": lr, "schedule.name": schedule}
    goes_on(job, tmp_path / f"hf/checkpoint-{runs.SAVED}", losses, tmp_path / "run", **changes)


def in_sharded_rank(job: Path, folder: Path, first: int = 0) -> list[float]:
    """Train by FSDP as one of the launched ranks."""
    rank = join()
    assert rank is not None
    return runs.fully_sharded(job, folder, rank.rank, rank.size, first)


def test_a_sharded_run_of_fsdp_goes_on(job: Path, tmp_path: Path) -> None:
    losses = launch(in_sharded_rank, job, tmp_path, nproc=2)[0]
    assert len(list((tmp_path / "script").glob("*.distcp"))) == 2
    goes_on(job, tmp_path / "script", losses, tmp_path / "run")
    goes_on(job, tmp_path / "state", losses, tmp_path / "other")


def test_fsdp_of_plain_pytorch_goes_on_from_an_export(
    job: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(
        load_config(
            str(job),
            {"out": str(tmp_path / "run"), "save_every": runs.SAVED, "checkpoints.keep_last": 9},
        )
    )
    command = [
        "checkpoint",
        "export",
        str(tmp_path / "run"),
        "--step",
        str(runs.SAVED),
        "--format",
        "dcp",
    ]
    assert main([*command, "--to", str(tmp_path / "dcp")]) == 0
    assert "Read back by torch.distributed.checkpoint, its loss on " in capfd.readouterr().err
    losses = launch(in_sharded_rank, job, tmp_path / "dcp", runs.SAVED, nproc=2)[0]
    assert losses == pytest.approx(runs.logged(tmp_path / "run")[runs.SAVED :], abs=NEAR)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        (
            "hostile",
            (
                ".metadata: refused: its pickle asks for posix.mkdir, which is not of its format;"
                " nothing was"
            ),
        ),
        ("cut", ".metadata: damaged: "),
        ("outside", "../__0_0.distcp is not read, only .distcp files as they are"),
        ("lost", "__0_0.distcp: cannot be read: No such file or directory"),
        ("weights", "holds no 'optimizer', beside which it is expected in one dictionary"),
    ],
)
def test_a_hostile_or_damaged_folder_is_one_line(
    job: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], what: str, says: str
) -> None:
    folder = tmp_path / "dcp"
    model = runs.model_and_rows(job)[0]
    state_dict_saver.save({"model": model.state_dict()}, checkpoint_id=folder, no_dist=True)
    file = folder / ".metadata"
    if what == "hostile":
        file.write_bytes(pickle.dumps(Hostile(tmp_path / "ran")))
    elif what == "cut":
        file.write_bytes(file.read_bytes()[:200])
    elif what == "outside":
        index = pickle.loads(file.read_bytes())
        for info in index.storage_data.values():
            info.relative_path = f"../{info.relative_path}"
        file.write_bytes(pickle.dumps(index))
    elif what == "lost":
        (folder / "__0_0.distcp").unlink()
    assert main(["train", str(job), "--resume", str(folder), "--out", str(tmp_path / "run")]) == 2
    assert says in capfd.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_run_of_deepspeed_on_two_ranks_goes_on(job: Path, tmp_path: Path, stage: int) -> None:
    losses = launch(in_rank, job, tmp_path / "ds", stage, nproc=2)[0]
    changes = {"strategy": "fsdp", "nproc": 2} if stage == 3 else {}
    goes_on(job, tmp_path / "ds", losses, tmp_path / "run", **changes)
    if stage in (1, 3):
        made = tmp_path / "universal"
        command = [
            sys.executable,
            "-m",
            "deepspeed.checkpoint.ds_to_universal",
            "--inject_missing_state",
        ]
        command += ["--num_extract_workers=1", "--num_merge_workers=1"]
        command += [
            "--input_folder",
            str(tmp_path / f"ds/global_step{runs.SAVED}"),
            "--output_folder",
            str(made),
        ]
        subprocess.run(
            command, check=True, capture_output=True, env=os.environ | {"DS_ACCELERATOR": "cpu"}
        )
        goes_on(job, made, losses, tmp_path / "of universal")


def test_a_run_of_lightning_goes_on(job: Path, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    losses = launch(runs.lightning, job, tmp_path / "lightning", nproc=1)[0]
    goes_on(
        job,
        tmp_path / f"lightning/epoch={runs.SAVED - 1}-step={runs.SAVED}.ckpt",
        losses,
        tmp_path / "run",
    )


def test_a_file_as_lightning_lays_it_out_goes_on(
    job: Path, accelerated: tuple[Path, list[float]], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    folder, losses = accelerated
    weights = {
        f"model.{name}": value for name, value in load_file(folder / "model.safetensors").items()
    }
    torch.save(
        {
            "epoch": 3,
            "global_step": runs.SAVED,
            "pytorch-lightning_version": "2.6.6",
            "state_dict": weights,
            "loops": {},
            "callbacks": {},
            "lr_schedulers": [{"last_epoch": 4}],
            "optimizer_states": [torch.load(folder / "optimizer.bin", weights_only=True)],
        },
        tmp_path / "some.ckpt",
    )
    goes_on(job, tmp_path / "some.ckpt", losses, tmp_path / "run")


class Hostile:
    """Writes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = str(file)

    def __reduce__(self) -> Any:
        return os.mkdir, (self._file,)


def _remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _remove_optimizer(folder: Path) -> None:
    (folder / "optimizer.bin").unlink()


def _make_hostile(folder: Path) -> None:
    torch.save({"state": Hostile(folder / "owned")}, folder / "optimizer.bin")


def _cut(folder: Path) -> None:
    file = folder / "optimizer.bin"
    file.write_bytes(file.read_bytes()[:1000])


def _lack_parameters(folder: Path) -> None:
    tree = torch.load(folder / "optimizer.bin", weights_only=True)
    tree["param_groups"][0]["params"].pop()
    torch.save(tree, folder / "optimizer.bin")


def _decay_all(folder: Path) -> None:
    tree = torch.load(folder / "optimizer.bin", weights_only=True)
    for group in tree["param_groups"]:
        group["weight_decay"] = runs.DECAY
    torch.save(tree, folder / "optimizer.bin")


def _end_late(folder: Path) -> None:
    (folder / "trainer_state.json").write_text(
        json.dumps({"global_step": runs.SAVED, "max_steps": 90})
    )


@pytest.mark.parametrize(
    ("damage", "changes", "text"),
    [
        (shutil.rmtree, {}, "no checkpoint there"),
        (_remove_weights, {}, "has no weights"),
        (_remove_optimizer, {}, "has no optimizer.pt"),
        (_make_hostile, {}, "asks for posix.mkdir, and only tensors"),
        (_cut, {}, "damaged"),
        (_lack_parameters, {}, "parameters: the config's model trains 41"),
        (_decay_all, {}, "was trained with weight_decay = 0.1, and would be with 0.0 here"),
        (_end_late, {}, "is of a run of 90 steps"),
        (None, {"model": "bert-tiny"}, "in the config's model"),
        (
            None,
            {"optimizer": {"weight_decay": 0.01}},
            "with weight_decay = 0.1, and would be with 0.01 here",
        ),
        (None, {"optimizer": {"name": "sgd"}}, "keeps exp_avg, exp_avg_sq"),
        (None, {"lr": 1e-3}, "was trained with lr = 0.005"),
        (None, {"schedule": {"name": "cosine"}}, "its rate after step 4 is"),
        (
            None,
            {"schedule": {"name": "linear", "warmup_steps": 1}},
            "set schedule.name and its warm-up to the same",
        ),
        (None, {"max_steps": 4}, "ends at step 4"),
        (None, {"lora": {"rank": 2}}, "lora: not with --resume"),
    ],
)
def test_a_checkpoint_that_cannot_go_on_is_one_line_and_writes_nothing(
    damage: Callable[[Path], None] | None,
    changes: dict[str, Any],
    text: str,
    job: Path,
    accelerated: tuple[Path, list[float]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = shutil.copytree(accelerated[0], tmp_path / "state")
    if damage:
        damage(folder)
    (tmp_path / "job.yaml").write_text(json.dumps(json.loads(job.read_text()) | changes))
    capsys.readouterr()
    told = [
        "train",
        str(tmp_path / "job.yaml"),
        "--resume",
        str(folder),
        "--out",
        str(tmp_path / "run"),
    ]
    assert main(told) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert text in lines[0]
    assert not (tmp_path / "run").exists()
    assert not (folder / "owned").exists()


def test_a_checkpoint_is_checked_before_ranks_start(
    job: Path,
    accelerated: tuple[Path, list[float]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jobs, "launch", lambda *_, **__: pytest.fail("ranks were started"))
    told = {
        "out": str(tmp_path / "run"),
        "resume": str(accelerated[0]),
        "strategy": "ddp",
        "nproc": 2,
        "lr": 1e-3,
    }
    with pytest.raises(ConfigError, match=r"was trained with lr = 0\.005"):
        train(load_config(str(job), told))


def test_an_epoch_that_is_under_way_is_said_to_be_in_another_order(
    job: Path,
    accelerated: tuple[Path, list[float]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "distcore")
    told = {"resume": str(accelerated[0])}
    train(load_config(str(job), told | {"out": str(tmp_path / "whole")}))
    assert "may come again" not in caplog.text
    three_an_epoch = {"out": str(tmp_path / "parts"), "global_batch_size": 6}
    train(load_config(str(job), told | three_an_epoch))
    assert "rows of the last 1 steps may come again" in caplog.text


def test_the_main_rank_alone_reads_and_all_ranks_fail(
    job: Path, accelerated: tuple[Path, list[float]], tmp_path: Path
) -> None:
    folder = shutil.copytree(accelerated[0], tmp_path / "state")
    _remove_weights(folder)
    with pytest.raises(CheckpointError, match="has no weights"):
        launch(in_joined_rank, job, folder, tmp_path / "run", nproc=2)


def in_joined_rank(job: Path, folder: Path, out: Path) -> None:
    """Resume as one of the launched ranks, which no process checked beforehand."""
    train(load_config(str(job), {"out": str(out), "resume": str(folder), "strategy": "ddp"}))


def test_tied_weights_and_prefixes_have_the_first_name_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    names = ModelNames(model, "there")
    given = ["module.1.weight", "module.0.bias", "module.1.bias"]
    assert names.renamed(given) == {given[0]: "0.weight", given[1]: "0.bias", given[2]: "1.bias"}
    with pytest.raises(ConfigError, match=r"holds no '1.bias' \(it holds '2.bias'\)"):
        names.renamed([*given[:2], "module.2.bias"])


def test_the_order_of_many_rows_changes_where_the_cores_does() -> None:
    assert reader.STORED_ROWS == STORED_ROWS
