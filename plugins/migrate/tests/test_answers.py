"""No stale answer: nothing that distcore has is called missing, and what is named instead is there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import pytest

from distcore import RunConfig, registry
from distcore.cli.commands import OWN
from distcore.cli.flags import FLAGS
from distcore.cli.launcher_flags import FLAGS as START
from distcore.config import flatten
from distcore_migrate import accelerate_config, deepspeed_config, fsdp_config, launcher_flags, training_arguments
from distcore_migrate.draft import Draft, Rule
from distcore_migrate.scripts import DATA_ROWS, MODEL_ROWS, NO_TRAINER_ROWS, TASK_ROWS

TABLES: dict[str, Mapping[str, Rule]] = {
    "TrainingArguments": training_arguments.ROWS,
    "accelerate": accelerate_config.ROWS,
    "accelerate's deepspeed_config": accelerate_config.SECTION_ROWS,
    "DeepSpeed": deepspeed_config.ROWS,
    "fsdp": fsdp_config.ROWS,
    "models": MODEL_ROWS,
    "data": DATA_ROWS,
    "scripts": NO_TRAINER_ROWS,
    **{f"task {name}": rows for name, rows in TASK_ROWS.items()},
    **{program: known.rows for program, known in launcher_flags.PROGRAMS.items()},
}
KEYS = {*RunConfig.model_fields, *flatten(RunConfig().model_dump(mode="json"))}
COMMANDS = {*OWN, *registry.offers("commands")}
SAME = {
    "autotuning": "tune", "tensor_parallel": "mesh", "parallelism_config": "mesh", "use_parallelism_config": "mesh",
    "sequence_parallel_size": "mesh", "compile": "--compile", "torchdynamo": "--compile", "dynamo_backend": "--compile",
    "exclude": "--exclude", "include": "--include", "hostfile": "--hostfile", "enable_each_rank_log": "--log-dir",
    "bind_cores_to_rank": "--bind-cores", "bind_core_list": "--bind-core-list",
    "log_dir": "--log-dir", "max_restarts": "max_restarts",
    "num_beams": "generation_config.json", "generation_num_beams": "generation_config.json",
}  # fmt: skip
"""Keys of others that distcore has under a name of its own."""


def answers(rows: Mapping[str, Rule]) -> Iterator[tuple[str, str, str]]:
    """Name, kind and text of what each row says of a value that asks for something."""
    for name, row in rows.items():
        for value in (2, "2", True, {"enabled": True}):
            draft = Draft()
            try:
                row(draft, name, value)
            except Exception:  # a value of another type
                continue
            for note in draft.notes:
                if note.kind not in ("off", "open"):
                    yield name, note.kind, note.text


@pytest.mark.parametrize("table", TABLES)
def test_what_is_here_is_not_called_missing(table: str) -> None:
    """An argument that has the very name of a key or a flag of distcore, or of a known other name, leads to it."""
    ours = {flag.name.removeprefix("--").replace("-", "_"): flag.name for flag in FLAGS}
    ours |= {flag.removeprefix("--").replace("-", "_"): flag for flag in START} | {key: key for key in KEYS} | SAME
    missing = {
        name: text
        for name, kind, text in answers(TABLES[table])
        if kind in ("none", "idle") and name in ours and ours[name] not in text and name not in text
        and not re.search(r"--\w|\w\.\w", text)
    }  # fmt: skip
    assert not {name: text for name, text in missing.items() if name not in EXCUSED}


EXCUSED = {
    "data_seed", "deterministic", "debug", "seed", "device", "module", "launcher", "timeout", "log_level", "task_name",
    "checkpoint", "preset", "set", "env", "quiet",
}  # fmt: skip
"""Names that mean something else there."""


@pytest.mark.parametrize("table", TABLES)
def test_every_flag_key_and_command_of_an_answer_is_there(table: str) -> None:
    flags = {flag.name for flag in FLAGS} | set(START) | {"--profile", "--sweep", "--set", "--best"}
    flags |= {"--model", "--data", "--task", "--nproc", "--to"}
    for name, _, text in answers(TABLES[table]):
        for flag in re.findall(r"(?<!\w)--[a-z][a-z-]+", text):
            assert flag in flags, f"{name}: {flag}"
        for key in re.findall(r"\b((?:optimizer|schedule|clip|loader|checkpoints|lora|ema)\.[a-z_]+)", text):
            assert key in KEYS or key.startswith("optimizer."), f"{name}: {key}"
        for command in re.findall(
            r"\bdistcore (?!itself\b)([a-z]+)\b(?! does| writes| splits| keeps| has| keeps)", text
        ):
            assert command in COMMANDS or command in ("'s",), f"{name}: distcore {command}"
