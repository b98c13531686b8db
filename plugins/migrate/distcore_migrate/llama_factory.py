"""LLaMA-Factory: the YAML of ``llamafactory-cli train``."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from distcore import ConfigError
from distcore_migrate import llama_factory_data, lora_rules, preferences, trl
from distcore_migrate.argument_rules import on
from distcore_migrate.draft import Draft, Rule, Tree, fact, no_effect, none, to, whole, written
from distcore_migrate.script import LoraDefaults, Script

INSTEAD = {
    "infer_backend": "distcore predict RUN --data FILE writes answers",
    "export_dir": "distcore checkpoint export RUN --to DIR writes a model, with its adapter merged",
}
"""Map each key of a file that trains nothing to its replacement here."""
STAGES = {"pt": "causal-lm", "sft": "causal-lm"}
"""``stage`` to a task of texts; ``dpo``, ``kto`` and ``rm`` take pairs of answers."""


def _part(draft: Draft, name: str, value: Any) -> None:
    if value and float(value) < 1:
        draft.set("task_options.eval_fraction", float(value), name)
    elif value:
        draft.note(
            "instead", written(name, value), "eval_fraction is a part of the rows, such as 0.1"
        )
    else:
        draft.note("off", name)


OWN = none("LLaMA-Factory's own method; of training there is the whole model, --freeze and --lora")
ROWS: dict[str, Rule] = trl.ROWS | {
    "stage": no_effect("the task says it"),
    "finetuning_type": lora_rules.switch("lora"),
    "cutoff_len": to("task_options.max_seq_len", whole),
    "template": none("the chat template of the model's tokenizer is used", off=("default",)),
    "dataset": fact("datasets"),
    "eval_dataset": fact("eval_datasets"),
    "dataset_dir": fact("dataset_dir"),
    "val_size": _part,
    "max_samples": fact("max_samples", whole),
    "overwrite_cache": no_effect("the cache goes by the content of the files"),
    "preprocessing_num_workers": trl.PREPARED,
    "tokenized_path": no_effect("tokens are kept in a cache that goes by the content of the files"),
    "plot_loss": no_effect("distcore report draws the losses"),
    "packing": trl.PACKED,
    "neat_packing": trl.PACKED,
    "flash_attn": trl.KERNELS,
    "enable_liger_kernel": trl.KERNELS,
    "pure_bf16": none("master weights are fp32; --precision bf16 is that of the forward pass"),
    "quantization_bit": lora_rules.QUANTIZED,
    "quantization_method": no_effect("base weights are not quantized here"),
    "adapter_name_or_path": none(
        "an adapter is trained from its beginning; a run goes on by --resume"
    ),
    "disable_gradient_checkpointing": no_effect("gradient_checkpointing is off unless it is set"),
    "pref_beta": none("a key of the loss of your task"),
    "pref_loss": none("a key of the loss of your task"),
    "use_galore": OWN,
    "use_apollo": OWN,
    "use_badam": OWN,
    "use_muon": on("optimizer.name", "muon"),
    "ray_run_name": no_effect("the run folder names the run"),
    "ray_num_workers": fact("processes", whole),
}


LORA = LoraDefaults(8, None)


def script_of(tree: Tree, beside: Path | None = None) -> Script:
    """Return the script that the YAML stands for. Raises ConfigError if the YAML trains nothing.

    ``beside``: the folder of the YAML.
    """
    for key, instead in INSTEAD.items():
        if key in tree:
            raise ConfigError(f"{key} = {tree[key]}: this file trains nothing; {instead}")
    stage = str(tree.get("stage", "sft"))
    data = partial(llama_factory_data.set_data, stage=stage, beside=beside)
    if stage in STAGES:
        return Script(
            task=STAGES[stage], rows=ROWS, lora=LORA, defaults={"cutoff_len": 2048}, data=data
        )
    if not preferences.is_shipped(stage):
        return Script(
            task=f"{stage}.py:{stage.upper()}", rows=ROWS, lora=LORA, needs_task=True, data=data
        )
    names = ("loss_type" if stage == "kto" else "pref_loss", "pref_beta")
    # its trainers of dpo and kto switch it off
    defaults = {"cutoff_len": 2048, "disable_dropout": stage != "rm"}
    return replace(preferences.script_of(stage, ROWS, LORA, defaults, names), data=data)
