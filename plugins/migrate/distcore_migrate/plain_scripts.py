"""The scripts of a published comparison: one BERT classifier, trained by each way
to use several GPUs.
"""

from __future__ import annotations

from distcore_migrate.draft import Rule, Tree, fact, no_effect, whole
from distcore_migrate.script import Script

RANKS = no_effect("the launcher says the ranks, and distcore tells each of them")
OWN_ROWS: dict[str, Rule] = {
    "local_world_size": RANKS,
    "local_rank": RANKS,
    "deepspeed_config": fact("deepspeed"),
}
JOB: Tree = {
    "model_name_or_path": "model_hub/chinese-bert-wwm-ext",
    "train_file": "data/train.json",
    "text_column_names": "text",
    "max_seq_length": 128,
    "per_device_train_batch_size": 32,
    "num_train_epochs": 1,
    "learning_rate": 3e-5,
    "weight_decay": 0.01,
    "lr_scheduler_type": "constant",
    "seed": 123,
    "output_dir": "output",
}
"""Values in the source of each script."""
ZERO: Tree = {
    "train_micro_batch_size_per_gpu": 32,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-5}},
    "fp16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "reduce_bucket_size": 2e8,
        "allgather_bucket_size": 2e8,
    },
}
"""The DeepSpeed config in the source of the DeepSpeed one."""
CUT = (
    "the script takes 92 % of the first 10,000 rows of its file for training; here a part of all"
    " rows is kept aside"
)

BLANKS = (
    "the script removes all blanks from its texts, which are words of Chinese with blanks between"
    " them; here texts are taken as they are: remove the blanks in the file, where a tokenizer is"
    " not blind to them"
)


def _script(strategy: str | None, rows: dict[str, Rule] | None = None, **more: object) -> Script:
    return Script(
        task="text-classification",
        trainer=False,
        own_loop=True,
        strategy=strategy,
        rows=OWN_ROWS | (rows or {}),
        defaults=JOB | more,
        differs=(CUT, BLANKS),
    )


SPAWNED: dict[str, Rule] = {"local_world_size": fact("processes", whole)}
SCRIPTS = {
    "single-gpu-cls": _script("single"),
    "multi-gpu-dataparrel-cls": _script("dp"),
    "multi-gpu-distributed-cls": _script("ddp"),
    "multi-gpu-distributed-mp-cls": _script("ddp", SPAWNED),
    "multi-gpu-distributed-mp-amp-cls": _script("ddp", SPAWNED, fp16=True),
    "multi-gpu-horovod-cls": _script("horovod"),
    "multi-gpu-deepspeed-cls": _script(None, deepspeed=ZERO, weight_decay=None),
    "multi-gpu-accelerate-cls": _script("ddp"),
    "multi-gpu-transformers-cls": _script("ddp"),
}
"""By name."""
