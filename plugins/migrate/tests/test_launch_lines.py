"""How ranks are started: whatever the launcher and the script, it becomes strategy, ranks and the
flags of a start.
"""

from __future__ import annotations

import shlex
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest
from migrate_cases import ZERO_YAML

from distcore.cli.main import main
from distcore.errors import ConfigError
from distcore_migrate import migrate
from distcore_migrate.launcher_flags import PROGRAMS

GLUE = "run_glue.py --model_name_or_path bert-base-cased --task_name mrpc --do_train --output_dir o"
TORCH = "--launcher torchrun:host1:9901 --nodes 2 --nproc 8"
LINES: dict[str, tuple[str, dict[str, Any], str]] = {
    "one process": (
        f"python -u {GLUE}",
        {"strategy": "single", "nproc": "auto", "global_batch_size": 8},
        "",
    ),
    "torchrun": (
        f"torchrun --standalone --nproc-per-node=2 {GLUE}",
        {"strategy": "ddp", "nproc": 2},
        "",
    ),
    "an abbreviated flag": (
        (
            "python -m torch.distributed.run --nproc_per_node=8 --nnode=2 --node_rank=0"
            f" --master_addr=host1 --master_port=9901 {GLUE}"
        ),
        {"strategy": "ddp", "nproc": "auto", "global_batch_size": 128},
        TORCH,
    ),
    "a rendezvous": (
        (
            "torchrun --nnodes 2 --nproc_per_node 8 --rdzv-backend c10d --rdzv-endpoint host1:9901"
            f" {GLUE}"
        ),
        {"global_batch_size": 128},
        TORCH,
    ),
    "the old launcher": (
        "python -m torch.distributed.launch --nproc_per_node 2 --use_env own.py --lr 3",
        {"strategy": "ddp", "nproc": 2},
        "",
    ),
    "a module": (
        f"deepspeed --num_accelerators 2 --module {GLUE.replace('.py', '')}",
        {"nproc": 2},
        "",
    ),
    "a module of python": (
        f"python -m {GLUE.replace('.py', '')}",
        {"task": "text-classification"},
        "",
    ),
    "elastic": (
        (
            "deepspeed --elastic_training --min_elastic_nodes 1 --max_elastic_nodes 4 --num_gpus 2"
            f" {GLUE}"
        ),
        {"strategy": "ddp"},
        "--launcher torchrun:HOST:29500 --nodes 1:4 --nproc 2",
    ),
    "a hostfile": (
        f"deepspeed --hostfile=hosts {GLUE}",
        {"global_batch_size": 56, "nproc": "auto"},
        "--launcher ssh --hostfile hosts",
    ),
    "a port of sshd": (
        f"deepspeed --hostfile=hosts --ssh_port 2222 {GLUE}",
        {"global_batch_size": 56, "nproc": "auto"},
        "--launcher ssh:2222 --hostfile hosts",
    ),
    "some machines of it": (
        f"deepspeed --hostfile hosts --num_nodes 1 --num_gpus 2 {GLUE}",
        {"global_batch_size": 16},
        "--launcher ssh --hostfile hosts --nodes 1 --nproc 2",
    ),
    "some slots of it": (
        f'deepspeed --hostfile hosts --include="worker-2:0,1@worker-1" {GLUE}',
        {"global_batch_size": 48},
        "--launcher ssh --hostfile hosts --include worker-2:0,1@worker-1",
    ),
    "others left out": (
        f"deepspeed --hostfile hosts -e worker-1:0 {GLUE}",
        {"global_batch_size": 48},
        "--launcher ssh --hostfile hosts --exclude worker-1:0",
    ),
    "without ssh": (
        (
            "deepspeed --hostfile hosts --no_ssh --node_rank=0 --master_addr=host1"
            f" --master_port=9901 --num_gpus 3 {GLUE}"
        ),
        {"global_batch_size": 48},
        "--launcher torchrun:host1:9901 --nodes 2 --nproc 3",
    ),
    "a device": (
        f"deepspeed --include localhost:1 {GLUE}",
        {"nproc": 1, "global_batch_size": 8},
        "--include localhost:1",
    ),
    "devices in front": (f"CUDA_VISIBLE_DEVICES=0,2 deepspeed {GLUE}", {"nproc": 2}, ""),
    "slurm by DeepSpeed": (
        (
            'deepspeed --launcher slurm --launcher_args "-p gpu" --enable_each_rank_log logs'
            f" --num_gpus 2 {GLUE}"
        ),
        {"global_batch_size": 16},
        "--log-dir logs --launcher slurm:gpu --nodes 1 --nproc 2",
    ),
    "a list of cores": (
        f"deepspeed --bind_cores_to_rank --bind_core_list 0-3,8 --num_gpus 2 {GLUE}",
        {"nproc": 2},
        "--bind-cores --bind-core-list 0-3,8",
    ),
    "cores": (f"deepspeed --bind_cores_to_rank --num_gpus 2 {GLUE}", {"nproc": 2}, "--bind-cores"),
    "horovodrun": (
        "horovodrun -np 2 -H localhost:2 --gloo python own.py",
        {"strategy": "horovod", "nproc": 2},
        "",
    ),
    "horovodrun with its buffers": (
        "horovodrun -np 2 --fusion-threshold-mb 32 --cycle-time-ms 3.5 python own.py",
        {
            "strategy": "horovod",
            "nproc": 2,
            "strategy_options": {"fusion_mb": 32.0, "cycle_ms": 3.5},
        },
        "",
    ),
    "horovodrun on two machines": (
        "horovodrun -np 4 -H host1:2,host2:2 python own.py --epochs 3",
        {"strategy": "horovod", "nproc": "auto"},
        "--launcher ssh --hostfile FILE",
    ),
    "mpirun": (
        (
            "mpirun --allow-run-as-root -np 2 -bind-to none -mca pml ob1 -x NCCL_DEBUG=INFO python"
            " own.py"
        ),
        {"strategy": "ddp", "nproc": 2},
        "",
    ),
    "mpirun on two machines": (
        "mpirun -n 4 -H host1:2,host2:2 python own.py",
        {"strategy": "ddp"},
        "--launcher mpi --hostfile FILE",
    ),
    "mpirun on the first of two machines": (
        "mpirun -n 2 -H host1:2,host2:2 python own.py",
        {"strategy": "ddp"},
        "--launcher mpi --hostfile FILE --nodes 1 --nproc 2",
    ),
    "horovodrun on a part of each": (
        "horovodrun -np 3 -H host1:2,host2:2 python own.py",
        {"strategy": "horovod"},
        "--launcher ssh --hostfile FILE --nodes 2",
    ),
    "srun": (
        f"srun -p gpu --nodes=2 --ntasks-per-node=4 --gres=gpu:4 python {GLUE}",
        {"strategy": "ddp", "global_batch_size": 64},
        "--launcher slurm:gpu --nodes 2 --nproc 4",
    ),
    "srun with a command inside": (
        (
            "srun --jobid 7 bash -c 'cd x && python -m torch.distributed.run --nproc_per_node 8"
            f" --nnodes 2 --master_addr host1 --master_port 9901 {GLUE}'"
        ),
        {"global_batch_size": 128},
        TORCH,
    ),
    "words of Slurm": (
        (
            'deepspeed --launcher slurm --num_nodes 2 --num_gpus 4 --launcher_args "-p gpu'
            f' --mem=10G" {GLUE}'
        ),
        {"strategy": "ddp"},
        "--launcher slurm:gpu --nodes 2 --nproc 4",
    ),
    "all devices": (f"deepspeed --num_gpus -1 {GLUE}", {"strategy": "ddp", "nproc": "auto"}, ""),
    "a word to be filled in": (f"torchrun --nproc_per_node {{GPUS}} {GLUE}", {"nproc": "auto"}, ""),
    "variables": (
        f"torchrun --nnodes '$NODES' --node_rank '$RANK' --nproc_per_node '$GPUS' {GLUE}",
        {"strategy": "ddp", "nproc": "auto"},
        "--launcher torchrun:HOST:29500 --nodes '$NODES'",
    ),
    "wrappers": (f"nohup uv run torchrun --nproc_per_node 2 {GLUE} > log 2>&1 &", {"nproc": 2}, ""),
    "accelerate on two machines": (
        (
            "accelerate launch --multi_gpu --num_machines 2 --num_processes 16 --machine_rank 0"
            f" --main_process_ip host1 --main_process_port 9901 {GLUE}"
        ),
        {"strategy": "ddp", "global_batch_size": 128},
        TORCH,
    ),
    "accelerate without a known script": (
        "accelerate launch --config_file zero.yaml own.py --lr 3",
        {
            "strategy": "deepspeed",
            "nproc": 2,
            "strategy_options": {"stage": 3, "offload_optimizer": "cpu"},
        },
        "",
    ),
    "DeepSpeed's own arguments": (
        "deepspeed --num_gpus 2 own.py --deepspeed --deepspeed_config ds.json --local_rank 0",
        {"strategy": "deepspeed", "global_batch_size": 24, "micro_batch_size": 3, "lr": 1e-4},
        "",
    ),
    "a Trainer of one's own": (
        "torchrun --nproc_per_node 2 own.py --per_device_train_batch_size 4 --bf16 --data_path x",
        {"global_batch_size": 8, "precision": "bf16", "lr": 5e-5, "epochs": 3},
        "",
    ),
    "a documented script": (
        (
            "python -m torch.distributed.launch --nproc_per_node=2 multi-gpu-distributed-cls.py"
            " --local_world_size=2"
        ),
        {"strategy": "ddp", "global_batch_size": 64, "task": "text-classification", "lr": 3e-5},
        "",
    ),
    "the same, spawned": (
        "python multi-gpu-distributed-mp-amp-cls.py --local_world_size=2",
        {"nproc": 2},
        "",
    ),
    "DataParallel": ("python multi-gpu-dataparrel-cls.py", {"strategy": "dp", "nproc": "auto"}, ""),
}
"""A launch line, keys of the config that it becomes, and the flags of the
command that starts it.
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("# machines\nworker-1 slots=4\nworker-2 slots=3\n")
    (tmp_path / "zero.yaml").write_text(ZERO_YAML)
    (tmp_path / "ds.json").write_text(
        '{"train_batch_size": 24, "train_micro_batch_size_per_gpu": 3, "zero_optimization": true,'
        ' "optimizer": {"type": "Adam", "params": {"lr": 1e-4}}}'
    )
    return tmp_path


@pytest.mark.parametrize(("line", "expected", "start"), LINES.values(), ids=LINES)
def test_the_launch_part_of_a_line(
    line: str, expected: dict[str, Any], start: str, folder: Path
) -> None:
    made = migrate([], shlex.split(line))
    tree = made.config.model_dump(mode="json")
    assert {key: tree[key] for key in expected} == expected
    assert shlex.join(made.start) == shlex.join(shlex.split(start))
    assert "one process, or one for each device" not in made.text or tree["nproc"] == "auto"
    flags = [
        word.lstrip("-").partition("=")[0].replace("-", "_")
        for word in shlex.split(line)
        if word[:2] == "--"
    ]
    known = {"nnode": "nnodes", "allow_run_as_root": "", "local_rank": ""}
    assert not [flag for flag in flags if known.get(flag, flag) not in made.text]


def test_a_script_that_is_not_known_leaves_its_task_open(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split("torchrun --nproc_per_node 2 own.py positional --lr 3")
    assert main(["migrate", "--out", "own.yaml", "--", *words]) == 0
    text = Path("own.yaml").read_text()
    assert "own: a script that is not known. What it trains is a task" in " ".join(
        text.split("\n#   ")
    )
    assert "strategy: ddp" in text
    assert "no equal here: lr = 3; argument = positional" in capsys.readouterr().err
    assert main(["train", "own.yaml", "--dry-run"]) == 2
    assert "no task named 'SAY-WHICH'" in capsys.readouterr().err
    assert main(["train", "own.yaml", "--task", "causal-lm", "--dry-run"]) == 2
    assert (
        "data = CHOOSE: this config leaves the rows open; name files there"
        in capsys.readouterr().err
    )
    command = ["train", "own.yaml", "--task", "causal-lm", "--data", "stdlib-source", "--dry-run"]
    assert main(command) == 0


def test_the_start_is_printed_and_stands_in_the_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["migrate", "--out", "two.yaml", "--"]
    command += shlex.split(f"deepspeed --hostfile hosts {GLUE}")
    assert main(command) == 0
    expected = "distcore train two.yaml --launcher ssh --hostfile hosts"
    assert f"start it by: {expected}" in capsys.readouterr().err
    assert (
        f"# Start it by: {expected.replace('two.yaml', 'THIS_FILE')}"
        in Path("two.yaml").read_text()
    )


def test_a_key_that_deepspeeds_optimizer_leaves_out_has_its_default(folder: Path) -> None:
    made = migrate(["ds.json"], [], nproc=2)
    assert made.config.optimizer.weight_decay == 0
    assert made.config.schedule.name == "constant"
    assert "optimizer.params.weight_decay, not given: DeepSpeed's default" in made.text
    assert made.config.strategy_options["stage"] == 1


WRONG: list[tuple[str, str]] = [
    ("deepspeed --hostfile twice own.py", r"hostfile twice, line 2: a is listed twice"),
    ("deepspeed --hostfile none.txt --include x:0 own.py --lr 3", ""),
    (
        "deepspeed --hostfile hosts --include worker-3 own.py",
        r"--include worker-3: no machine 'worker-3' \(did you",
    ),
    ("deepspeed --include a --exclude b own.py", r"DeepSpeed takes one of them; leave one out"),
    ("deepspeed --num_gpus 2 --include a:0 own.py", r"num_gpus with --include or --exclude"),
    ("srun -N 2 -n 5 python own.py", r"srun: 5 tasks on 2 machines"),
    (
        "srun -N 2 -n 6 --ntasks-per-node 2 python own.py",
        r"srun: 6 tasks, but 2 on each of 2 machine",
    ),
    ("mpirun -np 3 -H a:1,b:1 python own.py", r"H = 2, but np = 3: both say processes"),
    ("torchrun --nproc_per_node 2", r"names no script, a word that ends in .py, or a module"),
    (
        "my_launcher own.py",
        r"command 'my_launcher': not known; known programs are python, torchrun",
    ),
    (
        "torchrun --nproc_per_node 0 own.py",
        r"nproc_per_node = 0: expected a number of processes, 1 or more",
    ),
    (
        "torchrun --nproc_per_node two own.py",
        r"nproc_per_node = two: expected a number of processes, such as 2",
    ),
    ("torchrun --nproc_per_node -1 own.py", r"nproc_per_node = -1: expected a number of processes"),
    ("torchrun --nnodes 0 own.py", r"nnodes = 0: expected a number of machines, 1 or more"),
    ("torchrun --nnodes few own.py", r"nnodes = few: expected a number of machines, or MIN:MAX"),
    (
        "torchrun --nnodes 2 --node_rank 3 own.py",
        r"node_rank = 3, nnodes = 2: machines are counted from 0 to 1",
    ),
    (
        "torchrun --nnodes 1:2 --node_rank 2 own.py",
        r"node_rank = 2, nnodes = 1:2: machines are counted from 0 to 1",
    ),
    ("deepspeed --num_gpus 0 own.py", r"num_gpus = 0: expected a number of processes, 1 or more"),
    ("horovodrun -np 0 python own.py", r"np = 0: expected a number of processes, 1 or more"),
    (
        "accelerate launch --num_processes 3 --num_machines 2 own.py",
        r"num_processes = 3, num_machines = 2: as many processes start on each machine",
    ),
    (
        "accelerate launch --num_processes 4 --num_machines 2 --machine_rank 2 own.py",
        r"machine_rank = 2, num_machines = 2: machines are counted from 0 to 1",
    ),
    (
        "deepspeed --hostfile hosts --num_nodes 9 own.py",
        r"num_nodes = 9, but \d machines are named: make them equal",
    ),
    (
        "deepspeed --hostfile hosts --include worker-1:7 own.py",
        r"worker-1:7: worker-1 has \d slots, counted from 0",
    ),
    (
        "python zero_to_fp32.py a b",
        r"script zero_to_fp32.py: distcore checkpoint export RUN --to DIR",
    ),
]


@pytest.mark.parametrize(("line", "message"), WRONG)
def test_a_line_that_contradicts_itself_is_one_line(line: str, message: str, folder: Path) -> None:
    (folder / "twice").write_text("a slots=1\na slots=2\n")
    if not message:
        migrate([], shlex.split(line))
        return
    with pytest.raises(ConfigError, match=message) as caught:
        migrate([], shlex.split(line))
    assert "\n" not in str(caught.value)


def test_a_contradiction_writes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split("torchrun --nproc_per_node 0 own.py")
    assert main(["migrate", "--out", "never.yaml", "--", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not Path("never.yaml").exists()


def parsers() -> dict[str, ArgumentParser]:
    """The parsers of the installed launchers."""
    from accelerate.commands.launch import launch_command_parser
    from torch.distributed.run import get_args_parser

    return {"torchrun": get_args_parser(), "accelerate": launch_command_parser()}


@pytest.mark.parametrize("program", ["torchrun", "accelerate"])
def test_flags_take_values_as_in_the_installed_launcher(program: str) -> None:
    flags = PROGRAMS[program].flags
    ours = ("megatron_lm_", "fsdp_", "fp8_", "parallelism_config_", "help", "h")
    for action in parsers()[program]._actions:
        for name in {word.lstrip("-").replace("-", "_") for word in action.option_strings}:
            if not name.startswith(ours):
                assert name in (flags.switches if action.nargs == 0 else flags.values), name


def test_a_deepspeed_file_without_an_optimizer_sets_no_schedule(folder: Path) -> None:
    Path("bare.json").write_text('{"zero_optimization": {"stage": 2}}')
    assert "schedule" not in migrate(["bare.json"], [], nproc=2).text


def test_options_of_slurm_become_variables_of_the_job(folder: Path) -> None:
    options = [
        "--launcher",
        "slurm",
        "--launcher_args",
        "-p gpu --time 1:00:00 --exclusive -A acc --foo=3",
    ]
    made = migrate([], ["deepspeed", *options, "--num_nodes", "2", "train.py"])
    assert made.start == ("--launcher", "slurm:gpu", "--nodes", "2")
    for words in ("SBATCH_TIMELIMIT=1:00:00", "SBATCH_EXCLUSIVE=1", "SBATCH_ACCOUNT=acc"):
        assert words in made.text
    # --foo is none of Slurm's
    assert [about.partition(" ")[0] for about in made.no_equal] == ["launcher_args"]
    assert (
        "SBATCH_MEM_PER_NODE=8G"
        in migrate([], shlex.split("srun -N 2 -n 4 --mem=8G python train.py")).text
    )


@pytest.mark.parametrize("nodes", ["2", "1:4"])
def test_a_standalone_run_has_one_machine(nodes: str) -> None:
    with pytest.raises(
        ConfigError, match=r"standalone, nnodes = .*: torchrun meets on this machine alone"
    ):
        migrate(
            [], ["torchrun", "--standalone", f"--nnodes={nodes}", "--nproc_per_node=2", "train.py"]
        )


def test_elastic_machines_of_an_unknown_script_are_ranks_of_ddp() -> None:
    made = migrate([], ["torchrun", "--nnodes=1:4", "--nproc_per_node=2", "train.py"])
    assert "strategy: ddp  # nproc_per_node, nnodes" in made.text


def test_trl_evaluates_on_the_split_test() -> None:
    words = shlex.split("trl sft --dataset_name owner/chats --model_name_or_path owner/model")
    assert "eval_data" not in migrate([], words).config.task_options
    made = migrate([], [*words, "--eval_strategy", "epoch"])
    assert (
        "eval_data: owner/chats@test  # dataset_name, dataset_test_split (the script's)"
        in made.text
    )
