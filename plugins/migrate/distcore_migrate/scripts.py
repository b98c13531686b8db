"""The example scripts that people train with: which task each is, and one row
per argument beside TrainingArguments.
"""

from __future__ import annotations

from typing import Any

from distcore_migrate import plain_scripts, trl
from distcore_migrate.accelerate_config import ROWS as LAUNCHED
from distcore_migrate.draft import (
    OFF,
    Draft,
    Rule,
    Tree,
    fact,
    flag,
    instead,
    no_effect,
    none,
    to,
    whole,
)
from distcore_migrate.script import Script as Script

BEAMS = instead(
    "generation_config.json of the model's folder may have num_beams, which generation takes",
    off=(1,),
)
LIMIT = none(
    "cut the file to so many rows; of a dataset, save_to_disk a part and give FOLDER@SPLIT"
)
PADDED = no_effect(
    "rows are padded to the longest of their micro-batch, and padding takes no part in the loss"
)
REVISION = none("download that revision into a folder and give it as model", off=("main",))
OPTIONS = "task_options."

MODEL_ROWS: dict[str, Rule] = {
    "model_name_or_path": fact("model"),
    "model_type": fact("model_type"),
    "config_name": fact("config_name"),
    "tokenizer_name": fact("tokenizer_name"),
    "feature_extractor_name": fact("tokenizer_name"),
    "image_processor_name": fact("tokenizer_name"),
    "config_overrides": none(
        "a built-in model has its size by name; another is a folder with its config"
    ),
    "cache_dir": none("HF_HOME says where the hub's files are kept"),
    "model_revision": REVISION,
    "use_fast_tokenizer": no_effect("the model's own tokenizer, the fast one where there is one"),
    "use_slow_tokenizer": no_effect("the model's own tokenizer, the fast one where there is one"),
    "token": none("HF_TOKEN, or a login, opens private repositories"),
    "use_auth_token": none("HF_TOKEN, or a login, opens private repositories"),
    "trust_remote_code": none("code of the hub is never run; its model in a task of your own is"),
    "torch_dtype": none(
        "master weights are fp32; precision is that of the forward pass", off=("auto", "float32")
    ),
    "dtype": none(
        "master weights are fp32; precision is that of the forward pass", off=("auto", "float32")
    ),
    "low_cpu_mem_usage": no_effect("the strategy loads weights as it shards them"),
    "attn_implementation": none("transformers chooses the attention", off=("sdpa",)),
    "ignore_mismatched_sizes": no_effect("a head of another size is always made new"),
}
DATA_ROWS: dict[str, Rule] = {
    "dataset_name": fact("dataset"),
    "dataset_config_name": fact("dataset_config"),
    "dataset_config": fact("dataset_config"),
    "train_file": fact("train_file"),
    "validation_file": fact("validation_file"),
    "test_file": fact("test_file"),
    "max_train_samples": LIMIT,
    "max_eval_samples": LIMIT,
    "max_predict_samples": LIMIT,
    "max_val_samples": LIMIT,
    "overwrite_cache": no_effect("the cache goes by the content of the files"),
    "preprocessing_num_workers": no_effect("rows are prepared once, by one process, and kept"),
    "pad_to_max_length": PADDED,
    "streaming": none("rows are prepared once, in bounded memory"),
    "max_seq_length": to(f"{OPTIONS}max_seq_len", whole),
    "max_length": to(f"{OPTIONS}max_seq_len", whole),
}
NO_TRAINER_ROWS: dict[str, Rule] = {
    "num_warmup_steps": fact("warmup_steps", float),
    "max_train_steps": fact("max_steps", whole),
    "checkpointing_steps": fact("checkpointing_steps"),
    "with_tracking": fact("tracking", flag),
    "report_to": fact("report_to"),
    "report_name": no_effect("the run folder names the run"),
    "logging_steps": to("log_every", whole),
    "use_seedable_sampler": no_effect("the order of the rows follows from the seed"),
}
"""Rules for the scripts that write the loop out, with Accelerate."""
TASK_ROWS: dict[str, dict[str, Rule]] = {
    "text-classification": {
        "task_name": fact("glue"),
        "do_regression": fact("regression"),
        "metric_name": none(
            "accuracy and macro_f1, for numbers the correlations, are always there"
        ),
        "text_column_names": fact("text_columns"),
        "text_column_delimiter": none("join the columns in the file"),
        "label_column_name": to(f"{OPTIONS}columns.label", str),
        "train_split_name": fact("train_split"),
        "validation_split_name": fact("validation_split"),
        "test_split_name": instead("test_data takes a split, NAME@SPLIT"),
        "remove_splits": instead("data and eval_data take a split, NAME@SPLIT"),
        "remove_columns": no_effect("the columns of the task are read, and no others"),
        "shuffle_train_dataset": no_effect("rows are shuffled anew in each epoch"),
        "shuffle_seed": no_effect("one seed serves all"),
    },
    "causal-lm": {
        "block_size": fact("block_size", whole),
        "validation_split_percentage": fact("validation_percentage", float),
        "text_column_name": fact("text_column"),
        "keep_linebreaks": no_effect("texts are taken as they are"),
        "no_keep_linebreaks": none("texts are taken as they are"),
    },
    "masked-lm": {
        "mlm_probability": to(f"{OPTIONS}mask_probability", float),
        "line_by_line": fact("line_by_line", flag),
        "validation_split_percentage": fact("validation_percentage", float),
        "text_column_name": fact("text_column"),
    },
    "token-classification": {
        "task_name": no_effect("the script takes ner for every value"),
        "text_column_name": to(f"{OPTIONS}columns.tokens", str),
        "label_column_name": to(f"{OPTIONS}columns.tags", str),
        "label_all_tokens": none("the first token of a word has its tag"),
        "return_entity_level_metrics": no_effect(
            "precision, recall and F1 of entities are always there"
        ),
    },
    "seq2seq": {
        "text_column": fact("source_column"),
        "summary_column": fact("target_column"),
        "source_lang": fact("source_lang"),
        "target_lang": fact("target_lang"),
        "lang": none("prefix is a text before every source"),
        "forced_bos_token": no_effect("the text begins in target_lang"),
        "source_prefix": to(f"{OPTIONS}prefix", str),
        "max_source_length": to(f"{OPTIONS}max_seq_len", whole),
        "max_target_length": to(f"{OPTIONS}max_target_len", whole),
        "num_beams": BEAMS,
        "val_min_target_length": instead(
            "generation_config.json of the model's folder may have min_length"
        ),
        "n_val_batch_generations": no_effect(
            "distcore predict writes what the model says to every row"
        ),
        "n_train": LIMIT,
        "n_val": LIMIT,
        "val_max_target_length": fact("generation_length", whole),
        "ignore_pad_token_for_loss": none("padding takes no part in the loss", off=(True,)),
        "resize_position_embeddings": none(
            "max_seq_len is at most what the model has positions for"
        ),
    },
    "image-classification": {
        "train_dir": fact("train_file"),
        "validation_dir": fact("validation_file"),
        "train_val_split": to(f"{OPTIONS}eval_fraction", float),
        "image_column_name": to(f"{OPTIONS}columns.image", str),
        "label_column_name": to(f"{OPTIONS}columns.label", str),
    },
}
"""Arguments that only the scripts of one task have."""


GLUE_LENGTH: Tree = {"max_seq_length": 128}
LENGTHS: Tree = {"max_source_length": 1024, "max_target_length": 128}
GENERATED = LENGTHS | {"predict_with_generate": True}
"""The evaluation of the scripts without Trainer always generates."""
IMAGES: Tree = {"model_name_or_path": "google/vit-base-patch16-224-in21k", "train_val_split": 0.15}
CROPS = (
    "training images are cropped at random places and sizes by the script, moved by a few pixels"
    " here (augment)"
)
JOINED: Tree = {"task_options.end_documents": False}
BLOCKS = (
    "of every 1,000 texts the script drops what fills no block, and of each block it does not"
    " predict the first token; here every token but the very first is predicted"
)
MASKS = (
    "each evaluation of the script draws other masks; here evaluation has the same masks each time"
)
DROPS = (
    "training leaves out the last rows of an epoch that fill no batch (drop_last); here they are"
    " trained on"
)
MRPC = Script(
    task="text-classification",
    trainer=False,
    rows={
        "mixed_precision": LAUNCHED["mixed_precision"],
        "cpu": LAUNCHED["cpu"],
        "project_dir": no_effect("trackers write into the run folder"),
    },
    defaults={
        "task_name": "mrpc",
        "max_seq_length": 512,
        "model_name_or_path": "bert-base-cased",
        "per_device_train_batch_size": 16,
        "num_train_epochs": 3,
        "learning_rate": 2e-5,
        "num_warmup_steps": 100,
        "weight_decay": 0.01,
        "seed": 42,
    },
    differs=(
        "the script decays all parameters; here biases and normalization weights get none",
        DROPS,
    ),
)
SCRIPTS: dict[str, Script] = {
    "run_glue": Script(task="text-classification", defaults=GLUE_LENGTH),
    "run_glue_no_trainer": Script(task="text-classification", trainer=False, defaults=GLUE_LENGTH),
    "run_classification": Script(task="text-classification", defaults=GLUE_LENGTH),
    "run_cls_no_trainer": Script(task="text-classification", trainer=False, defaults=GLUE_LENGTH),
    "run_seq2seq_no_trainer": Script(task="seq2seq", trainer=False, defaults=GENERATED),
    "run_clm": Script(task="causal-lm", sets=JOINED, differs=(BLOCKS,)),
    "run_clm_no_trainer": Script(task="causal-lm", trainer=False, sets=JOINED, differs=(BLOCKS,)),
    "run_mlm": Script(task="masked-lm", differs=(MASKS,)),
    "run_mlm_no_trainer": Script(task="masked-lm", trainer=False, differs=(MASKS,)),
    "run_ner": Script(task="token-classification"),
    "run_ner_no_trainer": Script(task="token-classification", trainer=False),
    "run_summarization": Script(task="seq2seq", defaults=LENGTHS),
    "run_summarization_no_trainer": Script(task="seq2seq", trainer=False, defaults=GENERATED),
    "run_translation": Script(task="seq2seq", defaults=LENGTHS),
    "run_translation_no_trainer": Script(task="seq2seq", trainer=False, defaults=GENERATED),
    "run_image_classification": Script(
        task="image-classification", defaults=IMAGES, differs=(CROPS,)
    ),
    "run_image_classification_no_trainer": Script(
        task="image-classification", trainer=False, defaults=IMAGES, differs=(CROPS,)
    ),
    "nlp_example": MRPC,
    "complete_nlp_example": MRPC,
    **plain_scripts.SCRIPTS,
    **trl.SCRIPTS,
}
"""Scripts of transformers' and Accelerate's examples, by name."""


def rows_of(script: Script | None) -> dict[str, Rule]:
    """Return the rules of a script's own arguments.

    Without a script: the rules that all scripts share.
    """
    rows = MODEL_ROWS | DATA_ROWS
    if script is None:
        return rows
    return (
        rows
        | TASK_ROWS.get(script.task, {})
        | ({} if script.trainer else NO_TRAINER_ROWS)
        | script.rows
    )


def finish_no_trainer(draft: Draft, script: Script) -> None:
    """Set the behavior of scripts that have a loop of their own instead of the Trainer."""
    if draft.values.get("strategy") != "deepspeed":  # which clips as its own config says
        draft.values.setdefault("clip.norm", None)
        draft.origins.setdefault("clip.norm", "the script clips no gradients")
    every = draft.take("checkpointing_steps")
    if every is None or not str(every).isdigit():
        draft.set(
            "save_every", 0, draft.origin("checkpointing_steps") or "the script saves at its end"
        )
        (
            draft.note_fact("none", "checkpointing_steps", "save_every counts optimizer steps")
            if every
            else None
        )
    else:
        draft.set("save_every", int(every), draft.origin("checkpointing_steps"))
        draft.note_fact(
            "differs", "checkpointing_steps", "the newest two checkpoints are kept, and the best"
        )
    _track(draft)
    if not script.own_loop:
        draft.note(
            "differs",
            "lr_scheduler",
            "Accelerate steps a prepared schedule once per process, and the scripts "
            "make up for by as many more steps; here schedule and warm-up count optimizer steps",
        )


def _track(draft: Draft) -> None:
    """Switch on the trackers that ``report_to`` names where ``with_tracking`` is on; of
    all of them one.
    """
    tracking, trackers = draft.take("tracking"), draft.take("report_to", "all")
    if not tracking:
        draft.note_fact("idle", "report_to", "with_tracking is off")
        draft.note_fact("off", "tracking")
        return
    origin = draft.origin("tracking", "report_to")
    for word in trackers if isinstance(trackers, list) else [trackers]:
        name: Any = {"all": "tensorboard"}.get(word, word)
        if name in ("tensorboard", "wandb", "mlflow"):
            draft.set(f"extensions.{name}", True, origin)
        elif word not in OFF:
            draft.note("none", f"report_to = {word}", "trackers here: tensorboard, wandb, mlflow")
