"""TRL: the arguments of ``trl sft`` and its like, from a command line or a YAML file."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from distcore_migrate import lora_rules, preferences
from distcore_migrate.draft import (
    Draft,
    Rule,
    differs_if_on,
    fact,
    flag,
    instead,
    no_effect,
    none,
    to,
    whole,
    written,
)
from distcore_migrate.script import LoraDefaults, Script

TEMPLATE = none(
    "the chat template of the model's tokenizer is used: put one into its folder,"
    " chat_template.jinja"
)
PACKED = differs_if_on(
    "a row of its batch is a sequence of several rows, as long as max_length: fewer steps with more"
    " tokens each. Here global_batch_size counts rows of the data; they share a sequence where that"
    " is exact"
)
PREPARED = no_effect("rows are prepared once, by one process, and kept")
KERNELS = no_effect("transformers chooses attention and kernels")


def _completion_only(draft: Draft, name: str, value: Any) -> None:
    if value is None or flag(value):
        draft.note(
            "idle", written(name, value), "of a prompt with its completion the completion counts"
        )
    else:
        draft.note(
            "differs",
            written(name, value),
            "here the completion alone counts; for both, join them in a column named text",
        )


ROWS: dict[str, Rule] = lora_rules.ROWS | {
    "use_peft": lora_rules.switch(True),
    "lora_task_type": no_effect("the task says it"),
    "lora_modules_to_save": none("LoRA trains its matrices, and the head of a classifier"),
    "use_rslora": instead("lora.alpha / lora.rank is the factor"),
    "use_dora": none("LoRA is the plain form"),
    "use_bnb_nested_quant": lora_rules.QUANTIZED,
    "bnb_4bit_quant_type": no_effect("base weights are not quantized here"),
    "max_length": to("task_options.max_seq_len", whole),
    "max_seq_length": to("task_options.max_seq_len", whole),
    "packing": PACKED,
    "packing_strategy": no_effect("rows share a sequence where that is exact"),
    "eval_packing": no_effect("evaluation counts each row once"),
    "padding_free": no_effect("padding_free is auto: where it is exact and faster"),
    "dataset_text_field": fact("text_column"),
    "dataset_train_split": fact("train_split"),
    "dataset_test_split": fact("validation_split"),
    "dataset_num_proc": PREPARED,
    "dataset_batch_size": PREPARED,
    "dataset_streaming": none("rows are prepared once, in bounded memory"),
    "assistant_only_loss": fact("assistant_only", flag),
    "completion_only_loss": _completion_only,
    "chat_template_path": TEMPLATE,
    "eos_token": TEMPLATE,
    "pad_token": no_effect("padding takes no part in the loss"),
    "activation_offloading": instead("--set extensions.activation_offload=true, on an accelerator"),
    "gradient_accumulation_steps": fact("accumulation", whole),
    "env": no_effect("set it again where distcore train runs"),
}
DEFAULTS = {
    "learning_rate": 2e-5,
    "logging_steps": 10,
    "gradient_checkpointing": True,
    "max_length": 1024,
    "bf16": True,
    "dataset_test_split": "test",
}
"""Defaults of SFTConfig that differ from those of TrainingArguments; bf16 is on
where fp16 is not.
"""
LORA = LoraDefaults(16, 32.0, dropout=0.05, every_layer=False)
WHOLE = (
    "TRL counts all tokens of a conversation unless assistant_only_loss is on; here the assistant's"
    " count"
)


def _script(name: str) -> Script:
    """Return the trainer of that name: of preferences, or else with a file of the
    user's as its task.
    """
    if not preferences.is_shipped(name):
        defaults = DEFAULTS | {"learning_rate": 1e-6}
        return Script(
            task=f"{name}.py:{name.upper()}",
            rows=ROWS,
            defaults=defaults,
            lora=LORA,
            needs_task=True,
            evaluates_in_training=True,
        )
    rate = 1e-4 if name == "reward" else 1e-6
    defaults = DEFAULTS | {"learning_rate": rate, "disable_dropout": True}
    script = preferences.script_of(name, ROWS, LORA, defaults, ("loss_type", "beta"))
    return replace(script, evaluates_in_training=True)


SCRIPTS = {
    "sft": Script(
        task="causal-lm",
        rows=ROWS,
        defaults=DEFAULTS,
        lora=LORA,
        differs=(WHOLE,),
        evaluates_in_training=True,
    ),
    **{
        name: _script(name)
        for name in ("dpo", "kto", "orpo", "cpo", "grpo", "rloo", "ppo", "reward")
    },
}
"""By the name of the subcommand, which is that of the script."""
