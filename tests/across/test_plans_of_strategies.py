"""``distcore plan`` of the strategies that come with distcore: what each rank holds, and
what a step needs.
"""

from __future__ import annotations

import json
import logging
from itertools import groupby
from typing import Any

import pytest
from text_task import TEXTS

from distcore.cli.main import main

JOB = ("--task", TEXTS, "--data", "rows.json")


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The JSON that the command prints, rows by strategy and ranks."""
    assert main(["plan", *JOB, "--json", *arguments]) == 0
    tree: dict[str, Any] = json.loads(capsys.readouterr().out)
    tree["rows"] = {(row["strategy"], row["ranks"]): row for row in tree["rows"]}
    return tree


@pytest.mark.programs  # as long as one
@pytest.mark.usefixtures("work_folder")
def test_a_plan_of_many_ranks_is_made_in_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    strategies = ("--strategies", "single,ddp,fsdp,deepspeed:2")
    planned = plan(capsys, *strategies, "--nproc", "2,1024", "--device-memory", "1G,1M")
    count, rows = planned["parameters"], planned["rows"]
    assert ("single", 1) in rows  # one process, whatever --nproc says
    assert ("single", 1024) not in rows
    single = rows["single", 1]["memory"]
    assert (single["parameters"], single["gradients"]) == (4 * count, 4 * count)
    assert single["states"] == pytest.approx(16 * count, rel=1e-3)
    for ranks in (2, 1024):
        assert rows["ddp", ranks]["memory"]["states"] == single["states"]
        assert rows["deepspeed:2", ranks]["memory"]["states"] == pytest.approx(
            (4 + 16 / ranks) * count, rel=0.01
        )
        # Shards are whole rows, so on many ranks they do not come down to 16 / N.
        assert (
            16 * count / ranks
            <= rows["fsdp", ranks]["memory"]["states"]
            < 2 * 16 * count / ranks + 2**20
        )
    assert rows["ddp", 1024]["memory"]["sent"] == 2 * 4 * count * 1023 // 1024
    assert rows["ddp", 2]["fits"] == {"1G": True, "1M": False}
    # Fewer rows a rank need less; a sharded model less still. The peak is never below what
    # outlives the step.
    assert (
        rows["single", 1]["step"]["peak"]["activations"]
        > rows["ddp", 2]["step"]["peak"]["activations"]
    )
    assert rows["fsdp", 2]["step"]["peak"]["total"] < rows["ddp", 2]["step"]["peak"]["total"]
    for row in rows.values():
        if row["step"]:
            assert (
                row["step"]["peak"]["total"]
                >= row["memory"]["parameters"] + row["memory"]["optimizer"]
            )
            assert [m["phase"] for m in row["step"]["moments"]][
                :: len(row["step"]["moments"]) - 1
            ] == [
                "forward",
                "step",
            ]


@pytest.mark.programs
@pytest.mark.usefixtures("work_folder")
def test_the_table_names_what_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (
        "--strategies",
        "ddp,fsdp:sharding=hybrid,shard_size=3",
        "--nproc",
        "4",
        "--device-memory",
        "8G",
    )
    assert main(["plan", *JOB, *arguments]) == 0
    text = capsys.readouterr().out
    assert "fits 8G" in " ".join(text.split())
    assert (
        "shard_size=3 on 4 rank(s): not known: strategy_options.shard_size = 3: must divide the 4"
        " ranks" in text
    )


@pytest.mark.programs  # as long as one
@pytest.mark.usefixtures("work_folder")
def test_an_accelerator_that_is_not_here_is_planned_as_an_estimate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Dropout and attention keep less there, nothing is copied to be sent, and what
    is offloaded is elsewhere.
    """
    strategies = (
        "--strategies",
        "single,fsdp,fsdp:cpu_offload=true",
        "--nproc",
        "4",
        "--device-memory",
        "1G",
    )
    here = plan(capsys)["rows"]
    there = plan(capsys, *strategies, "--device", "cuda")["rows"]
    single, offloaded = there["single", 1], there["fsdp:cpu_offload=true", 4]
    assert single["memory"] == here["single", 1]["memory"]
    assert single["step"]["peak"]["activations"] < here["single", 1]["step"]["peak"]["activations"]
    states = there["fsdp", 4]["memory"]["states"]
    assert offloaded["memory"]["host"] == states
    assert there["fsdp", 4]["step"]["peak"]["total"] - offloaded["step"]["peak"][
        "total"
    ] == pytest.approx(states, rel=0.3)
    command = ["plan", *JOB, "--device", "cuda", "--device-memory", "80G", "--precision", "fp16"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "activations and peak are an estimate for cuda" in text
    assert all(
        f"{line}: " in text
        for line in ("CUDA context", "cuBLAS workspaces", "NCCL buffers", "fragmentation")
    )


@pytest.mark.programs  # as long as one
@pytest.mark.usefixtures("work_folder")
def test_engines_of_libraries_are_traced(capsys: pytest.CaptureFixture[str]) -> None:
    rows = (
        "deepspeed:stage=0",
        *(f"deepspeed:stage={stage},reduce_bucket_size=auto" for stage in (1, 2, 3)),
    )
    peaks, single = {}, plan(capsys)["rows"]["single", 1]["step"]
    for strategy in (
        *rows,
        "horovod",
        "accelerate:ddp",
        "dp",
        "accelerate:zero_stage=2,backend=deepspeed",
    ):
        (row,) = plan(capsys, "--set", f"strategy={strategy}", "--nproc", "2")["rows"].values()
        assert row["step"], row
        peak, memory = row["step"]["peak"]["total"], row["memory"]
        assert peak > memory["parameters"] + memory["optimizer"] + memory["copies"]
        peaks[strategy] = peak
    assert peaks["deepspeed:stage=0"] > peaks[rows[2]]
    here = (
        "--strategies",
        "accelerate:fsdp2,fsdp",
        "--nproc",
        "4",
        "--device",
        "cuda",
        "--device-memory",
        "1G",
    )
    shards = plan(capsys, *here)["rows"]
    ours, theirs = shards["fsdp", 4], shards["accelerate:fsdp2", 4]
    assert theirs["memory"]["states"] == ours["memory"]["states"]
    assert theirs["step"]["peak"]["total"] == pytest.approx(ours["step"]["peak"]["total"], rel=0.1)
    # The next plan in this process finds nothing that an engine has left.
    (row,) = plan(capsys, "--set", f"strategy={rows[3]}", "--nproc", "8")["rows"].values()
    assert row["step"]["peak"]["total"] < peaks[rows[3]]
    assert plan(capsys)["rows"]["single", 1]["step"] == single


@pytest.mark.programs  # as long as one
@pytest.mark.usefixtures("work_folder")
def test_the_memory_of_an_engine_beside_the_model_is_in_its_trace(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def step(strategy: str) -> dict[str, Any]:
        (row,) = plan(capsys, "--set", f"strategy={strategy}", "--nproc", "2")["rows"].values()
        assert row["step"], row
        traced: dict[str, Any] = row["step"]
        return traced

    # The buckets of DDP live from step to step; without them a step begins without gradients.
    buckets = step("ddp")["moments"][0]
    assert buckets["gradients"] == buckets["parameters"]
    fusion = [step(f"horovod:fusion_mb={size}")["peak"]["total"] for size in (64, 1)]
    assert fusion[0] - fusion[1] == 63 * 2**20
    bucket = [
        step(f"deepspeed:stage=2,reduce_bucket_size={size},overlap_comm=false")["peak"]
        for size in (2**23, 2**22)
    ]
    assert bucket[0]["total"] - bucket[1]["total"] == 4 * 2**22


@pytest.mark.programs  # as long as one
@pytest.mark.usefixtures("work_folder")
def test_a_micro_batch_between_others_may_need_most(capsys: pytest.CaptureFixture[str]) -> None:
    """Under DDP all gradients of those before it live beside the buckets, into which the
    last one moves them.
    """
    few = (
        "--strategies",
        "single,ddp",
        "--nproc",
        "2",
        "--max-seq-len",
        "16",
        "--micro-batch-size",
        "1",
    )
    two, three, four = (
        plan(capsys, *few, "--global-batch-size", f"{2 * count}") for count in (2, 3, 4)
    )
    between = three["rows"]["ddp", 2]["step"]
    # Parameters, the optimizer's state of two, buckets and gradients; and another gradient, which
    # is added to the last.
    assert between["peak"]["total"] > 5 * 4 * two["parameters"] + 4 * 512 * 128
    assert [phase for phase, _ in groupby(moment["phase"] for moment in between["moments"])] == [
        *("forward", "backward") * 3,
        "step",
    ]
    assert two["rows"]["ddp", 2]["step"]["peak"]["total"] < between["peak"]["total"]
    assert four["rows"]["ddp", 2]["step"] == between
    assert two["rows"]["single", 1]["step"]["peak"] == four["rows"]["single", 1]["step"]["peak"]


@pytest.mark.programs  # as long as one
@pytest.mark.usefixtures("work_folder")
def test_states_of_a_mesh_are_those_of_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    rows = plan(capsys, "--strategies", "mesh:tp=2,mesh:replicate=2", "--nproc", "2,4")["rows"]
    assert len(rows) == 4
    for row in rows.values():
        memory, moments = row["memory"], row["step"]["moments"]
        assert memory["parameters"] == moments[0]["parameters"]
        assert memory["optimizer"] == moments[0]["optimizer"]
        assert memory["gradients"] == max(moment["gradients"] for moment in moments)
        assert memory["sent"] is None


@pytest.mark.programs
@pytest.mark.usefixtures("work_folder")
def test_a_pipeline_has_the_states_of_the_stage_that_needs_most(
    capsys: pytest.CaptureFixture[str],
) -> None:
    planned = plan(capsys, "--strategies", "mesh:pp=2", "--nproc", "2,4")
    (two, four), count = (
        (planned["rows"]["mesh:pp=2", ranks] for ranks in (2, 4)),
        planned["parameters"],
    )
    # half of the blocks, and all embeddings
    assert 4 * count / 2 < two["memory"]["parameters"] < 4 * count
    assert two["memory"]["optimizer"] == pytest.approx(2 * two["memory"]["parameters"], rel=1e-3)
    assert (two["memory"]["buffers"], two["step"]) == (0, None)
    assert four["memory"]["parameters"] == pytest.approx(two["memory"]["parameters"] / 2, rel=1e-3)
    assert two["untraced"] == "strategy_options.pp = 2: a pipeline is not traced; plan without pp"


@pytest.mark.programs
@pytest.mark.usefixtures("work_folder")
def test_the_log_lines_of_a_strategy_are_not_written_for_a_trace(
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = logging.getLogger("distcore")
    monkeypatch.setattr(log, "handlers", [caplog.handler])
    log.setLevel(logging.INFO)
    rows = plan(capsys, "--strategies", "mesh:tp=2", "--nproc", "2")["rows"]
    assert rows["mesh:tp=2", 2]["step"]
    assert [record.getMessage() for record in caplog.records if "mesh" in record.getMessage()] == []
    assert log.level == logging.INFO
