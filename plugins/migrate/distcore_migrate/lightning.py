"""Lightning CLI: its YAML of ``trainer``, ``model`` and ``data``, as arguments by flat names."""

from __future__ import annotations

from typing import Any

from distcore_migrate.draft import (
    OFF,
    Draft,
    Rule,
    Tree,
    fact,
    instead,
    no_effect,
    to,
    whole,
    written,
)
from distcore_migrate.script import Script

SECTIONS = frozenset(
    {"trainer", "model", "data", "optimizer", "lr_scheduler", "seed_everything", "ckpt_path", "fit"}
)
OPTIMIZERS = {"AdamW": "adamw", "Adam": "adam", "SGD": "sgd"}
"""Optimizers by the names of their classes, with torch's own defaults here as there,
but for the rate.
"""
TORCH_LR = 1e-3
"""The rate of these classes where the file names none."""
IN_THE_MODEL = "configure_optimizers()"
"""Stands for the optimizer of a file that names none."""
PRECISIONS = {
    "32": "fp32",
    "32-true": "fp32",
    "16": "fp16",
    "16-mixed": "fp16",
    "bf16": "bf16",
    "bf16-mixed": "bf16",
}


def _strategy(draft: Draft, name: str, value: Any) -> None:
    """Keep the kind of strategy, by Lightning's short name or the name of its class."""
    name_of_strategy = value.get("class_path", value) if isinstance(value, dict) else value
    _, _, word = str(name_of_strategy).lower().rpartition(".")
    if word in ("auto", "singledevicestrategy"):
        draft.note("off", name)
    elif word.startswith("deepspeed"):
        draft.keep("kind", "deepspeed", name)
        # Such as deepspeed_stage_3_offload.
        digits = [int(letter) for letter in word if letter.isdigit()]
        if digits:
            draft.keep("zero_stage", digits[0], name)
    elif word.startswith("fsdp"):
        draft.keep("kind", "fsdp", name)
    elif word.startswith("ddp"):
        draft.keep("kind", "ddp", name)
        if "find_unused_parameters_true" in word:
            draft.set("strategy_options.find_unused", True, name)
    else:
        draft.note("none", written(name, value), "distcore strategies lists those of here")


def _devices(draft: Draft, name: str, value: Any) -> None:
    if isinstance(value, list):
        draft.keep("processes_here", len(value), name)
    elif str(value).lstrip("-").isdigit() and int(value) > 0:
        draft.keep("processes_here", int(value), name)
    else:
        draft.note("off", name)


def _accelerator(draft: Draft, name: str, value: Any) -> None:
    if value in ("cpu", "mps"):
        draft.set("device", value, name)
    else:
        draft.note("off", name)


def _precision(draft: Draft, name: str, value: Any) -> None:
    if str(value) in PRECISIONS:
        draft.keep("launched_precision", PRECISIONS[str(value)], name)
    else:
        draft.note("none", written(name, value), "precisions here: fp32, bf16, fp16")


def _optimizer(draft: Draft, name: str, value: Any) -> None:
    """Set the optimizer of the same class of torch, or say that there is none of it, or that
    the file has none.
    """
    word = str(value).rpartition(".")[2]
    if value == IN_THE_MODEL:
        draft.note(
            "open",
            "optimizer",
            "configure_optimizers() of the model says it, with rate and schedule: set "
            "optimizer.name, lr and schedule.name",
        )
    elif word in OPTIMIZERS:
        draft.set("optimizer.name", OPTIMIZERS[word], name)
        draft.note("differs", name, "weight decay spares biases and normalization weights here")
    else:
        draft.note(
            "none",
            written(name, value),
            "left at the default, adamw; optimizer.name takes file.py:Class",
        )


def _scheduler(draft: Draft, name: str, value: Any) -> None:
    """Set the schedule: a cosine to 0 over the epochs is here, and what is not is constant."""
    tree = value if isinstance(value, dict) else {"class_path": value}
    _, _, class_name = str(tree.get("class_path")).rpartition(".")
    arguments = tree.get("init_args") or {}
    is_cosine = class_name == "CosineAnnealingLR" and not arguments.get("eta_min")
    if is_cosine and arguments.get("T_max") == tree.get("epochs"):
        draft.set("schedule.name", "cosine", name)
        draft.set("schedule.interval", "epoch", name)
        return
    draft.set("schedule.name", "constant", name)
    if tree["class_path"] is not None:
        draft.note(
            "none",
            written(name, class_name),
            "written as constant; schedule.name and schedule.interval=epoch have others",
        )


def _callbacks(draft: Draft, name: str, value: Any) -> None:
    """Set what a callback of Lightning does here by a key; say of the others
    that they are extensions.
    """
    for callback in value if isinstance(value, list) else [value]:
        tree = callback if isinstance(callback, dict) else {"class_path": callback}
        _, _, word = str(tree.get("class_path")).rpartition(".")
        arguments = tree.get("init_args") or {}
        about = f"{name}: {word}"
        if word == "EarlyStopping":
            draft.set("patience", whole(arguments.get("patience", 3)), about)
            draft.note(
                "differs",
                about,
                f"evaluations without a better {arguments.get('monitor')}: name it by"
                " checkpoints.best",
            )
        elif word == "ModelCheckpoint":
            draft.note(
                "instead",
                about,
                "checkpoints.best, checkpoints.keep_last and save_every say what is kept",
            )
        elif word in (
            "LearningRateMonitor",
            "RichProgressBar",
            "TQDMProgressBar",
            "ModelSummary",
            "RichModelSummary",
        ):
            draft.note(
                "idle",
                about,
                "each log line has the rate, and a run shows its progress and its model",
            )
        elif value not in OFF:
            draft.note("instead", about, "an extension may do it (extensions: file.py:Class)")


def _positive(rule: Rule) -> Rule:
    def inner(draft: Draft, name: str, value: Any) -> None:
        if value in OFF or value == -1:
            draft.note("off", name)
        else:
            rule(draft, name, value)

    return inner


OBJECT = no_effect("extensions, checkpoints and the progress line are keys of their own")
ROWS: dict[str, Rule] = {
    "trainer.max_epochs": _positive(fact("epochs", float)),
    "trainer.max_steps": _positive(fact("max_steps", whole)),
    "trainer.accelerator": _accelerator,
    "trainer.devices": _devices,
    "trainer.num_nodes": fact("machines", whole),
    "trainer.strategy": _strategy,
    "trainer.precision": _precision,
    "trainer.accumulate_grad_batches": fact("accumulation", whole),
    "trainer.gradient_clip_val": _positive(to("clip.norm", float)),
    "trainer.gradient_clip_val, by value": _positive(to("clip.value", float)),
    "trainer.gradient_clip_algorithm": no_effect("it says whether clip.norm or clip.value is set"),
    "trainer.log_every_n_steps": _positive(to("log_every", whole)),
    "trainer.val_check_interval": instead("eval_every counts optimizer steps"),
    "trainer.check_val_every_n_epoch": no_effect("a run evaluates at the ends of its epochs"),
    "trainer.deterministic": _positive(to("deterministic", bool)),
    "trainer.default_root_dir": _positive(to("out", str)),
    "trainer.callbacks": _callbacks,
    "trainer.logger": instead("extensions.tensorboard, extensions.wandb or extensions.mlflow"),
    "trainer.enable_checkpointing": OBJECT,
    "trainer.enable_progress_bar": OBJECT,
    "trainer.enable_model_summary": OBJECT,
    "seed_everything": _positive(to("seed", whole)),
    "model.class_path": no_effect("the task is its equal: model, loss and metrics"),
    "data.class_path": no_effect("the task is its equal: rows and their batches"),
    "data.init_args.batch_size": fact("per_device", whole),
    "data.batch_size": fact("per_device", whole),
    "data.init_args.num_workers": to("loader.workers", whole),
    "optimizer.class_path": _optimizer,
    "optimizer.init_args.lr": to("lr", float),
    "optimizer.init_args.weight_decay": to("optimizer.weight_decay", float),
    "optimizer.init_args.betas": to("optimizer.betas", list),
    "optimizer.init_args.eps": to("optimizer.eps", float),
    "optimizer.init_args.momentum": to("optimizer.momentum", float),
    "optimizer.init_args.nesterov": to("optimizer.nesterov", bool),
    "lr_scheduler": _scheduler,
    "ckpt_path": instead("--resume FILE: it is read as it is"),
}


def arguments_of(tree: Tree) -> Tree:
    """Return the leaves of the file by dotted names; those of the model and of unknown
    depth stay one value.
    """
    inner = tree["fit"] if isinstance(tree.get("fit"), dict) else tree
    flat: Tree = {}
    for name, value in inner.items():
        _spread(flat, name, value)
    if "optimizer.class_path" in flat:
        flat.setdefault("optimizer.init_args.lr", TORCH_LR)
        scheduler = inner.get("lr_scheduler") or {"class_path": None}
        scheduler = scheduler if isinstance(scheduler, dict) else {"class_path": scheduler}
        flat["lr_scheduler"] = {**scheduler, "epochs": flat.get("trainer.max_epochs")}
    else:
        flat["optimizer.class_path"] = IN_THE_MODEL
    if (
        flat.get("trainer.gradient_clip_algorithm") == "value"
        and "trainer.gradient_clip_val" in flat
    ):
        flat["trainer.gradient_clip_val, by value"] = flat.pop("trainer.gradient_clip_val")
    return flat


def _spread(flat: Tree, name: str, value: Any) -> None:
    """Add the keys of a section by their dotted names, no more than three parts long."""
    # These two have a class and its arguments, which one rule reads.
    is_one_key = name in ("trainer.strategy", "lr_scheduler")
    if not isinstance(value, dict) or is_one_key or name.count(".") >= 2:
        flat[name] = value
        return
    for key, inner in value.items():
        _spread(flat, f"{name}.{key}", inner)


def script_of(tree: Tree) -> Script:
    """Return the script that the file stands for: the class of its model is a task
    of the user's own.
    """
    inner = tree["fit"] if isinstance(tree.get("fit"), dict) else tree
    model = inner.get("model") or {}
    path = str(model.get("class_path", "model.Model") if isinstance(model, dict) else model)
    module, _, name = path.rpartition(".")
    task = f"{module.rpartition('.')[2] or 'model'}.py:{name}"
    return Script(task=task, trainer=False, own_loop=True, rows=ROWS, needs_task=True)
