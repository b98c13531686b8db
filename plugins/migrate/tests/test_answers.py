"""No stale answer: nothing that distcore has is called missing, and what is
named instead is there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import pytest

from distcore import RunConfig, registry
from distcore.cli.commands import OWN
from distcore.cli.flags import FLAGS
from distcore.cli.launcher_flags import FLAGS as START
from distcore.config import flatten
from distcore_migrate import (
    accelerate_config,
    axolotl,
    deepspeed_config,
    fsdp_config,
    launcher_flags,
    lightning,
    llama_factory,
    preferences,
    training_arguments,
    trl,
)
from distcore_migrate.draft import Draft, Rule
from distcore_migrate.scripts import DATA_ROWS, MODEL_ROWS, NO_TRAINER_ROWS, TASK_ROWS

TABLES: dict[str, Mapping[str, Rule]] = {
    "TrainingArguments": training_arguments.ROWS,
    "accelerate config": accelerate_config.ROWS,
    "accelerate's deepspeed_config": accelerate_config.SECTION_ROWS,
    "DeepSpeed": deepspeed_config.ROWS,
    "fsdp": fsdp_config.ROWS,
    "models": MODEL_ROWS,
    "data": DATA_ROWS,
    "scripts": NO_TRAINER_ROWS,
    "TRL": trl.ROWS,
    "Axolotl": axolotl.ROWS,
    "LLaMA-Factory": llama_factory.ROWS,
    "Lightning": lightning.ROWS,
    "preferences": preferences.PREFERENCE_ROWS,
    "rewards": preferences.REWARD_ROWS,
    **{f"task {name}": rows for name, rows in TASK_ROWS.items()},
    **{program: known.rows for program, known in launcher_flags.PROGRAMS.items()},
}
KEYS = {*RunConfig.model_fields, *flatten(RunConfig().model_dump(mode="json"))}
COMMANDS = {*OWN, *registry.offers("commands")}
SAME = {
    "autotuning": "tune",
    "tensor_parallel": "mesh",
    "parallelism_config": "mesh",
    "use_parallelism_config": "mesh",
    "sequence_parallel_size": "mesh",
    "compile": "--compile",
    "torchdynamo": "--compile",
    "dynamo_backend": "--compile",
    "exclude": "--exclude",
    "include": "--include",
    "hostfile": "--hostfile",
    "enable_each_rank_log": "--log-dir",
    "bind_cores_to_rank": "--bind-cores",
    "bind_core_list": "--bind-core-list",
    "log_dir": "--log-dir",
    "max_restarts": "max_restarts",
    "num_beams": "generation_config.json",
    "generation_num_beams": "generation_config.json",
}
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
def test_an_argument_with_the_name_of_a_key_leads_to_it(table: str) -> None:
    """An argument that has the very name of a key or a flag of distcore, or of a known other
    name, leads to it.
    """
    ours = {flag.name.removeprefix("--").replace("-", "_"): flag.name for flag in FLAGS}
    ours |= (
        {flag.removeprefix("--").replace("-", "_"): flag for flag in START}
        | {key: key for key in KEYS}
        | SAME
    )
    missing = {
        name: text
        for name, kind, text in answers(TABLES[table])
        if kind in ("none", "idle") and name in ours and ours[name] not in text and name not in text
        and not re.search(r"--\w|\w\.\w", text)
    }  # fmt: skip
    assert not {name: text for name, text in missing.items() if name not in EXCUSED}


EXCUSED = {
    "data_seed",
    "deterministic",
    "debug",
    "seed",
    "device",
    "module",
    "launcher",
    "timeout",
    "log_level",
    "task_name",
    "checkpoint",
    "preset",
    "set",
    "env",
    "quiet",
    "optimizer",
    "packing",
}
"""Names that mean something else there."""


OURS = re.compile(
    r"(?<!\w)--[a-z][a-z-]+|\bdistcore [a-z]+|\b[a-z]\w+\.[a-z]\w+\b|\b[a-z]+_[a-z_]+\b"
)
"""A flag, a command, a dotted key or another name with an underscore in an answer."""
NAMED = {
    "tpu",
    "tpu_num_cores",
    "tpu_metrics_debug",
    "xla",
    "xla_fsdp_v2",
    "xla_fsdp_settings",
    "xla_fsdp_grad_ckpt",
    "use_peft",
    "adapter",
    "finetuning_type",
    "use_galore",
    "use_apollo",
    "use_badam",
    "adapter_name_or_path",
    "lora_model_dir",
    "pure_bf16",
    "overwrite_output_dir",
    "trainer.strategy",
    "eval_delay",
    "optimizer.class_path",
    "lr_scheduler",
    "max_prompt_length",
    "max_completion_length",
    "resize_position_embeddings",
    "generation_config",
}
"""Arguments without an equal whose answer names what else there is."""


@pytest.mark.parametrize("table", TABLES)
def test_an_answer_without_an_equal_names_no_flag(table: str) -> None:
    """An answer of the kind "no equal" names no flag, key or command that does the same."""
    known = KEYS | {"generation_config.json", "strategy_options.param_dtype", "eval_fraction"}
    for name, kind, text in answers(TABLES[table]):
        named = {
            word
            for word in OURS.findall(text)
            if word.startswith(("--", "distcore ")) or word in known
        }
        named -= {
            word
            for word in named
            if word.startswith("distcore ") and word.split()[1] not in COMMANDS
        }
        assert kind != "none" or not named or name in NAMED, f"{name}: {named}"


@pytest.mark.parametrize(
    ("table", "name", "value"),
    [
        ("DeepSpeed", "autotuning", {"enabled": True}),
        ("DeepSpeed", "optimizer", {"type": "Muon"}),
        ("deepspeed", "autotuning", "tune"),
        ("task seq2seq", "num_beams", 4),
        (
            "accelerate config",
            "parallelism_config",
            {"parallelism_config_tp_size": 2, "parallelism_config_cp_size": 2},
        ),
        ("accelerate config", "dynamo_backend", "inductor"),
        ("TrainingArguments", "resume_from_checkpoint", "runs/checkpoint-500"),
        ("TrainingArguments", "optim", "adamw_bnb_8bit"),
        ("Lightning", "ckpt_path", "last.ckpt"),
    ],
)
def test_an_argument_with_another_way_has_the_kind_instead(
    table: str, name: str, value: object
) -> None:
    draft = Draft()
    TABLES[table][name](draft, name, value)
    assert {note.kind for note in draft.notes} - {"differs"} == {"instead"}


@pytest.mark.parametrize("table", TABLES)
def test_every_flag_key_and_command_of_an_answer_is_there(table: str) -> None:
    flags = {flag.name for flag in FLAGS} | set(START) | {"--profile", "--sweep", "--set", "--best"}
    flags |= {"--model", "--data", "--task", "--nproc", "--to", "--checkpoint", "--eval-data"}
    for name, _, text in answers(TABLES[table]):
        for flag in re.findall(r"(?<!\w)--[a-z][a-z-]+", text):
            assert flag in flags, f"{name}: {flag}"
        for key in re.findall(
            r"\b((?:optimizer|schedule|clip|loader|checkpoints|lora|ema)\.[a-z_]+)", text
        ):
            assert key in KEYS or key.startswith("optimizer."), f"{name}: {key}"
        for command in re.findall(
            r"\bdistcore (?!itself\b)([a-z]+)\b(?! does| writes| splits| keeps| has| keeps)", text
        ):
            assert command in COMMANDS or command in ("'s",), f"{name}: distcore {command}"
