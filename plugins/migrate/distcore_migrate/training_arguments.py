"""``TrainingArguments`` of transformers, from its JSON or a command line: one row per argument, of
versions 4 and 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distcore_migrate.argument_rules import (
    compiled,
    deepspeed,
    level,
    on,
    optimizer,
    precision,
    sampling,
    trackers,
)
from distcore_migrate.draft import (
    Draft,
    Rule,
    Tree,
    apply,
    fact,
    flag,
    instead,
    no_effect,
    none,
    positive_or_none,
    to,
    whole,
)
from distcore_migrate.flag_parsing import abbreviated

DEFAULTS: Tree = {
    "per_device_train_batch_size": 8,
    "num_train_epochs": 3,
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "logging_steps": 500,
    "save_strategy": "steps",
    "save_steps": 500,
    "eval_strategy": "no",
    "seed": 42,
    "ddp_timeout": 1800,
}
"""The Trainer's defaults that differ from distcore's."""

RESUME = instead("--resume FOLDER: it is read as it is")
OWN_TASK = "the loss of a task of your own may do it"
HUB = instead("export a folder (distcore checkpoint export) and upload that")
APEX = (
    "there is no apex here, nor in transformers 5: fp16 is torch's autocast, or the strategy's own"
)
BEAMS = "generation_config.json of the model's folder may have num_beams, which generation takes"
MESH = "--strategy mesh splits layers over ranks (tensor, sequence and context parallel)"
LAUNCHED = no_effect("ranks are started by --nproc or a launcher, which tells them")
PINNED = no_effect("the loader keeps to defaults of its own")
COLLECTED = no_effect("evaluation adds up sums over the rows of a rank, each row once")

ROWS: dict[str, Rule] = {
    # the run
    "output_dir": to("out", str),
    "run_name": no_effect("the run folder names the run"),
    "overwrite_output_dir": none("--overwrite sets the run aside that a folder holds"),
    "do_train": fact("do_train"),
    "do_eval": no_effect(
        "a run evaluates at the ends of epochs and tests at its end; distcore eval does it again"
    ),
    "do_predict": fact("do_predict"),
    "resume_from_checkpoint": RESUME,
    "restore_callback_states_from_checkpoint": no_effect("a resume restores what extensions keep"),
    "ignore_data_skip": none("a resume goes on at the very row"),
    "seed": to(
        "seed",
        whole,
        "its own random numbers: the same seed draws other rows and weights than the Trainer",
    ),
    "data_seed": none("one seed serves all", off=(42,)),
    "full_determinism": on("deterministic", True),
    "use_cpu": on("device", "cpu"),
    "no_cuda": on("device", "cpu"),
    "use_mps_device": on("device", "mps"),
    # batches
    "per_device_train_batch_size": fact("per_device", whole),
    "per_gpu_train_batch_size": fact("per_device", whole),
    "gradient_accumulation_steps": fact("accumulation", whole),
    "per_device_eval_batch_size": no_effect("evaluation takes the micro-batch of training"),
    "per_gpu_eval_batch_size": no_effect("evaluation takes the micro-batch of training"),
    "train_batch_size": no_effect("per_device_train_batch_size says it"),
    "eval_batch_size": no_effect("evaluation takes the micro-batch of training"),
    "auto_find_batch_size": instead("give a micro_batch_size that fits"),
    "group_by_length": on("loader.length_grouping", "window"),
    "train_sampling_strategy": sampling,
    "length_column_name": no_effect("lengths are counted in tokens"),
    "sortish_sampler": no_effect("rows of like length share a micro-batch inside a step"),
    # steps and rates
    "num_train_epochs": fact("epochs", float),
    "max_steps": fact("max_steps", whole),
    "learning_rate": to("lr", float),
    "lr_scheduler_type": fact("schedule"),
    "lr_scheduler_kwargs": fact("schedule_arguments"),
    "warmup_steps": fact("warmup_steps", float),
    "warmup_ratio": fact("warmup_ratio", float),
    "average_tokens_across_devices": fact("average_tokens"),
    # optimizer
    "optim": optimizer,
    "optim_args": instead("optimizer.betas and optimizer.eps are keys of their own"),
    "optim_target_modules": none("freeze takes a pattern of parameter names"),
    "weight_decay": to("optimizer.weight_decay", float),
    "adam_beta1": fact("beta1", float),
    "adam_beta2": fact("beta2", float),
    "adam_epsilon": to("optimizer.eps", float),
    "adafactor": instead("written as adamw; --optimizer adafactor"),
    "max_grad_norm": to("clip.norm", positive_or_none),
    "label_smoothing_factor": fact("label_smoothing", float),
    "neftune_noise_alpha": none(OWN_TASK),
    "early_stopping_patience": to("patience", whole),
    "early_stopping_threshold": none("any better value counts", off=(0, 0.0)),
    # precision and memory
    "bf16": precision("bf16"),
    "fp16": precision("fp16"),
    "bf16_full_eval": on("eval_precision", "bf16"),
    "fp16_full_eval": on("eval_precision", "fp16"),
    "fp16_opt_level": no_effect("a level of apex, which is not used here"),
    "fp16_backend": none(APEX, off=("auto", "amp", "cuda_amp", "cpu_amp")),
    "half_precision_backend": none(APEX, off=("auto", "amp", "cuda_amp", "cpu_amp")),
    "tf32": on("tf32", True),
    "gradient_checkpointing": on("gradient_checkpointing", True),
    "gradient_checkpointing_kwargs": no_effect("torch's non-reentrant form is used"),
    "activation_checkpointing": on("gradient_checkpointing", True),
    "activation_checkpointing_kwargs": no_effect("torch's non-reentrant form is used"),
    "torch_compile": on("compile", "on"),
    "torch_compile_backend": compiled,
    "torch_compile_mode": compiled,
    "torchdynamo": instead("use --compile on or --compile regions"),
    "use_liger_kernel": none("a task of your own may build its model so"),
    "liger_kernel_config": none("a task of your own may build its model so"),
    "use_cache": no_effect("only generation keeps keys and values"),
    "torch_empty_cache_steps": no_effect("torch's allocator is left alone"),
    "jit_mode_eval": none("evaluation runs the model as it trains"),
    "use_ipex": none("there is no such backend here"),
    "mp_parameters": none("there is no SageMaker here"),
    "past_index": none(OWN_TASK, off=(-1,)),
    # evaluation
    "eval_strategy": fact("eval_strategy"),
    "evaluation_strategy": fact("eval_strategy"),
    "evaluate_during_training": none("say eval_strategy"),
    "eval_steps": fact("eval_steps", float),
    "eval_delay": none("eval_every counts from the first step", off=(0, 0.0)),
    "eval_on_start": instead(
        "evaluate the model itself with distcore eval, or compare from the first evaluation on"
    ),
    "prediction_loss_only": no_effect("metrics cost no pass of their own"),
    "eval_do_concat_batches": COLLECTED,
    "eval_use_gather_object": COLLECTED,
    "eval_accumulation_steps": COLLECTED,
    "batch_eval_metrics": COLLECTED,
    "include_for_metrics": none(
        "the report of a task of your own gets rows and outputs", off=([],)
    ),
    "include_inputs_for_metrics": none("the report of a task of your own gets rows and outputs"),
    "metric_for_best_model": fact("best_metric"),
    "greater_is_better": no_effect("a metric knows which way is better"),
    "load_best_model_at_end": instead(
        "the final test is of the last weights; distcore eval --best takes the best"
    ),
    "predict_with_generate": fact("generate", flag),
    "generation_max_length": fact("generation_length", whole),
    "generation_num_beams": instead(BEAMS, off=(1,)),
    "generation_config": none("max_new_tokens is the option of the task"),
    # logs and checkpoints
    "logging_dir": no_effect("the run folder holds the logs"),
    "logging_strategy": fact("logging_strategy"),
    "logging_steps": fact("logging_steps", float),
    "logging_first_step": no_effect(
        "metrics.jsonl has an evaluation at each epoch's end, and log_every sets the rest"
    ),
    "logging_nan_inf_filter": none("a loss that is not finite is shown as it is", off=(True,)),
    "log_on_each_node": no_effect("the main rank alone logs"),
    "log_level": level("log_level"),
    "log_level_replica": level("log_level_replica"),
    "include_num_input_tokens_seen": no_effect("task and log line count what they count"),
    "include_tokens_per_second": no_effect(
        "train/samples_per_second is logged, and distcore plan says the tokens of a step"
    ),
    "skip_memory_metrics": no_effect("report.json has the memory"),
    "disable_tqdm": on("extensions.progress", False),
    "report_to": trackers,
    "project": no_effect("a name for trackers"),
    "trackio_space_id": none("there is no such tracker here", off=("trackio",)),
    "trackio_bucket_id": none("there is no such tracker here"),
    "trackio_static_space_id": none("there is no such tracker here"),
    "save_strategy": fact("save_strategy"),
    "save_steps": fact("save_steps", float),
    "save_total_limit": fact("save_total_limit", whole),
    "save_safetensors": no_effect("checkpoints are safetensors and JSON"),
    "save_only_model": instead(
        "a checkpoint holds all that a resume needs; distcore checkpoint export writes the model"
        " alone"
    ),
    "save_on_each_node": no_effect("each rank writes its own piece, once"),
    "enable_jit_checkpoint": no_effect("SIGTERM stops a run after a checkpoint as it is"),
    # the loader
    "dataloader_num_workers": to("loader.workers", whole),
    "dataloader_drop_last": none("the last step of an epoch takes the rows that are left"),
    "dataloader_pin_memory": PINNED,
    "dataloader_persistent_workers": PINNED,
    "dataloader_prefetch_factor": PINNED,
    "dataloader_multiprocessing_context": PINNED,
    "dataloader_in_order": none("rows come in the order that the seed says", off=(True,)),
    "remove_unused_columns": no_effect("the columns of the task are read, and no others"),
    "label_names": no_effect("the task knows its labels"),
    "accelerator_config": no_effect(
        "the sampler is distcore's: every row once, split over the ranks"
    ),
    "split_batches": no_effect("global_batch_size is always split over the ranks"),
    "dispatch_batches": no_effect("every rank reads its own rows"),
    # ranks
    "ddp_find_unused_parameters": fact("ddp_find_unused", flag),
    "ddp_bucket_cap_mb": fact("ddp_bucket_mb", whole),
    "ddp_static_graph": fact("ddp_static_graph", flag),
    "ddp_broadcast_buffers": no_effect("buffers with state are sent from rank 0"),
    "ddp_backend": no_effect("the backend is the one that torch names for the device"),
    "xpu_backend": no_effect("the backend is the one that torch names for the device"),
    "ddp_timeout": to("timeout", whole),
    "local_rank": LAUNCHED,
    "local-rank": LAUNCHED,
    "_n_gpu": LAUNCHED,
    "fsdp": fact("fsdp"),
    "fsdp_config": fact("fsdp_config"),
    "fsdp_min_num_params": fact("fsdp_min_num_params"),
    "fsdp_transformer_layer_cls_to_wrap": fact("fsdp_transformer_layer_cls_to_wrap"),
    "sharded_ddp": instead("say --strategy fsdp"),
    "deepspeed": deepspeed,
    "deepspeed_config": fact("deepspeed"),
    "parallelism_config": instead(MESH),
    "tpu_num_cores": none("there is no XLA here; --device takes what torch.accelerator sees"),
    "tpu_metrics_debug": none("there is no XLA here; --device takes what torch.accelerator sees"),
    "debug": instead("--profile and the NaN guard are extensions", off=([],)),
    "ray_scope": instead("--sweep is a grid of runs", off=("last",)),
    "use_legacy_prediction_loop": no_effect("there is one evaluation loop"),
    # the hub
    "push_to_hub": HUB,
    "push_to_hub_model_id": HUB,
    "push_to_hub_organization": HUB,
    "push_to_hub_token": HUB,
    "hub_model_id": HUB,
    "hub_token": no_effect("nothing is uploaded"),
    "hub_strategy": no_effect("nothing is uploaded"),
    "hub_private_repo": no_effect("nothing is uploaded"),
    "hub_always_push": no_effect("nothing is uploaded"),
    "hub_revision": no_effect("nothing is uploaded"),
}


def read(draft: Draft, given: Tree, own: Mapping[str, Rule]) -> None:
    """Put the given arguments into ``draft``; raises ConfigError, one line, for a
    value that cannot be.

    ``own`` has the rules of the script's own arguments, which TrainingArguments lacks.
    """
    asked = {name: None if _is_placeholder(value) else value for name, value in given.items()}
    apply(draft, {**ROWS, **own}, asked, "the script or of TrainingArguments")


def in_full(given: Tree, own: Mapping[str, Rule]) -> Tree:
    """Return the arguments of a command line by their whole names.

    argparse takes abbreviations, and ``--no_NAME`` for a switch.
    """
    rows = {**ROWS, **own}
    arguments = {abbreviated(name, rows.keys()) or name: value for name, value in given.items()}
    for name in list(arguments):
        positive = name.removeprefix("no_")
        # A few arguments begin with no_ themselves.
        if name not in rows and positive in rows:
            arguments[positive] = not arguments.pop(name)
    return arguments


def fill(draft: Draft, defaults: Tree, own: Mapping[str, Rule], whose: str) -> None:
    """Add defaults of arguments that no source sets, under any name; ``whose``: their origin."""
    for name, value in defaults.items():
        row = own.get(name) or ROWS[name]
        # What the row would set: another argument, of another name, may have set it.
        trial = Draft()
        row(trial, name, value)
        has_fact = bool(trial.facts.keys() & draft.facts.keys())
        has_value = bool(trial.values.keys() & draft.values.keys())
        if not has_fact and not has_value:
            row(draft, f"{name} ({whose})", value)


def _is_placeholder(value: Any) -> bool:
    """Return True for the placeholder that ``to_json_string`` writes in place of a token."""
    return isinstance(value, str) and value.startswith("<") and value.endswith("_TOKEN>")
