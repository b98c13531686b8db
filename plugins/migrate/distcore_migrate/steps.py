"""Translate facts from several keys: batches, steps, schedule,
evaluations, checkpoints, precision.
"""

from __future__ import annotations

from distcore import ConfigError
from distcore_migrate.draft import OFF, Draft, Tree

SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_restarts": "cosine_with_restarts",
    "polynomial": "polynomial",
    "constant": "constant",
    "constant_with_warmup": "constant_with_warmup",
    "inverse_sqrt": "inverse_sqrt",
    "warmup_stable_decay": "warmup_stable_decay",
}
"""``lr_scheduler_type`` to ``schedule.name``."""
NEAREST = {
    "cosine_with_min_lr": "cosine",
    "cosine_warmup_with_min_lr": "cosine",
    "reduce_lr_on_plateau": "constant",
    "greedy": "constant",
    "rex": "cosine",
    "quadratic": "cosine",
    "one_cycle": "linear",
}
"""Replacements for names without an equal."""
LACKS = {"sgd": ("betas", "eps"), "adafactor": ("betas", "eps"), "lion": ("eps",)}
"""Map each optimizer to the settings of Adam that it ignores or interprets differently."""


def batch(draft: Draft, nproc: int | None, reads_batch: bool) -> int:
    """Set both batch sizes, and return the number of processes on all machines; raises ConfigError.

    ``nproc`` is the value of ``--nproc``; ``reads_batch``: some source has batch sizes,
    or defaults of them.
    """
    processes = draft.take("processes")
    if nproc is not None and processes not in (None, nproc):
        raise ConfigError(
            f"--nproc {nproc}, but {draft.origin('processes')} = {processes}: leave --nproc out, or"
            " change it"
        )
    per_device, accumulation = draft.take("per_device"), draft.take("accumulation")
    whole = draft.take("global_batch")
    ranks = nproc or processes or _implied(whole, per_device, accumulation)
    per_device, accumulation = _derived(draft, whole, per_device, accumulation, ranks or 1)
    if per_device is not None:
        draft.set(
            "micro_batch_size",
            per_device,
            draft.origin("per_device") or draft.origin("global_batch", "accumulation"),
        )
    if ranks is None and reads_batch:
        draft.note(
            "open",
            "number of processes",
            "nothing says it, so 1 is assumed; --nproc N says another, also "
            "where plain python would take several GPUs as DataParallel",
        )
    ranks = ranks or 1
    if per_device is None and whole is None:
        draft.note_fact(
            "open",
            "accumulation",
            "goes into global_batch_size with the rows of a device, which are open",
        )
        if reads_batch:
            draft.note(
                "open",
                "global_batch_size",
                "the sources leave the batch open; distcore's default is 32 rows",
            )
        return ranks
    rows = per_device * ranks * (accumulation or 1) if per_device is not None else whole
    if whole is not None and whole != rows:
        origins = draft.origin("per_device", "accumulation", "processes")
        raise ConfigError(
            f"{draft.origin('global_batch')} = {whole}, but {origins}: {per_device} rows * {ranks}"
            f" processes * {accumulation or 1} accumulation steps = {rows}; make them equal, or"
            " give --nproc"
        )
    origin = draft.origin("per_device", "accumulation", "global_batch")
    draft.set("global_batch_size", rows, origin)
    if per_device is not None:
        many = (
            f"{per_device} rows of a device * {ranks} process(es) * {accumulation or 1}"
            " accumulation step(s)"
        )
        draft.note(
            "differs",
            origin,
            f"global_batch_size is the rows of a step over all ranks: {rows} = {many}; it "
            "stays so at any number of ranks",
        )
    return ranks


def _derived(
    draft: Draft,
    whole: int | None,
    per_device: int | None,
    accumulation: int | None,
    ranks: int,
) -> tuple[int | None, int | None]:
    """Return rows per device and accumulation steps.

    DeepSpeed derives the missing one of the two from ``whole``, the rows of a step.
    """
    has_one_of_both = (per_device is None) != (accumulation is None)
    if whole is None or not has_one_of_both:
        return per_device, accumulation
    if whole % (ranks * (per_device or accumulation or 1)):
        return per_device, accumulation
    if accumulation is None and per_device is not None:
        return per_device, whole // (ranks * per_device)
    if accumulation not in (None, 1):
        return whole // (ranks * accumulation), accumulation
    return per_device, accumulation


def _implied(whole: int | None, per_device: int | None, accumulation: int | None) -> int | None:
    """Return the number of processes that three batch sizes come to; ``None``: one is missing."""
    if whole is None or per_device is None or accumulation is None:
        return None
    rows_per_process = per_device * accumulation
    return None if whole % rows_per_process else whole // rows_per_process


def length(draft: Draft) -> int | None:
    """Set epochs or steps; return the steps of the run, where that is known."""
    steps, epochs = draft.take("max_steps", -1), draft.take("epochs")
    if steps > 0:
        draft.set("max_steps", steps, draft.origin("max_steps"))
        draft.note_fact("idle", "epochs", "max_steps overrides it")
        return int(steps)
    draft.note_fact("off", "max_steps")
    if epochs is not None:
        whole = max(1, round(epochs))
        draft.set("epochs", whole, draft.origin("epochs"))
        if whole != epochs:
            draft.note_fact(
                "none",
                "epochs",
                f"epochs are whole: written as {whole}; max_steps can end a run earlier",
            )
    return None


def schedule(draft: Draft, total: int | None) -> None:
    """Set the schedule and its warm-up; ``total``: the steps of the run, or ``None``."""
    name = draft.take("schedule")
    if name in NEAREST:
        draft.note_fact("none", "schedule", f"written as {NEAREST[name]}")
    elif name is not None and name not in SCHEDULES:
        schedules = ", ".join(SCHEDULES)
        raise ConfigError(
            f"{draft.origin('schedule')} = {name!r}: no schedule of transformers ({schedules})"
        )
    if name is not None:
        schedule_here = NEAREST.get(name) or SCHEDULES[name]
        draft.set("schedule.name", schedule_here, draft.origin("schedule"))
    _warmup(draft)
    arguments = draft.take("schedule_arguments")
    if arguments in OFF:
        draft.note_fact("off", "schedule_arguments")
    elif name == "warmup_stable_decay" and total and "num_decay_steps" in arguments:
        ratio = round(arguments["num_decay_steps"] / total, 6)
        draft.set("schedule.decay_ratio", ratio, draft.origin("schedule_arguments"))
        if set(arguments) - {"num_decay_steps", "num_stable_steps"}:
            draft.note_fact(
                "none", "schedule_arguments", "only the length of the decay is a key here"
            )
    else:
        hint = (
            "; schedule.decay_ratio is the decay as a part of the run"
            if name == "warmup_stable_decay"
            else ""
        )
        draft.note_fact(
            "none", "schedule_arguments", f"schedules have their own arguments' defaults{hint}"
        )


def _warmup(draft: Draft) -> None:
    """Set the warm-up, in steps or as a part of the run; steps come before a ratio."""
    steps = draft.take("warmup_steps", 0)
    ratio = draft.take("warmup_ratio", 0)
    # Since transformers 5 a number of steps below 1 is a ratio.
    if 0 < steps < 1:
        ratio = steps
        steps = 0
    if steps:
        draft.set("schedule.warmup_steps", int(steps), draft.origin("warmup_steps"))
        draft.note_fact("off", "warmup_ratio")
    elif ratio:
        origin = draft.origin("warmup_ratio", "warmup_steps")
        draft.set("schedule.warmup_ratio", ratio, origin)
        remark = "the steps that come out are rounded, the Trainer rounds them up"
        draft.note("differs", origin, remark)
    else:
        draft.note_fact("off", "warmup_ratio")
        draft.note_fact("off", "warmup_steps")


def betas(draft: Draft) -> None:
    """Set both running means of Adam where a source has one of them."""
    if draft.facts.keys() & {"beta1", "beta2"}:
        both = [draft.take("beta1", 0.9), draft.take("beta2", 0.999)]
        draft.set("optimizer.betas", both, draft.origin("beta1", "beta2"))
        draft.opaque.add("optimizer.betas")


def optimizer_options(draft: Draft) -> None:
    """Leave out the settings of Adam that the optimizer does not have."""
    name = draft.values.get("optimizer.name")
    for key in LACKS.get(str(name), ()):
        if f"optimizer.{key}" in draft.values:
            del draft.values[f"optimizer.{key}"]
            draft.note("idle", draft.origins.pop(f"optimizer.{key}"), f"{name} has no {key}")


def evaluation(draft: Draft, total: int | None) -> None:
    """Set how often the run evaluates, logs and saves."""
    kind = str(draft.take("eval_strategy", "no"))
    if kind == "steps":
        every = "eval_steps" if draft.take("eval_steps") else "logging_steps"
        _every(draft, "eval_every", every, total, "eval_strategy")
        draft.set("eval_at_epoch_end", False, draft.origin("eval_strategy"))
    else:
        draft.note_fact("off", "eval_steps")
        if kind == "epoch":
            draft.set("eval_every", 0, draft.origin("eval_strategy"))
        else:
            draft.set("eval_at_epoch_end", False, draft.origin("eval_strategy"))
    _saving(draft, total)
    kind = str(draft.take("logging_strategy", "steps"))
    if kind == "steps":
        draft.note_fact("off", "logging_strategy")
        _every(draft, "log_every", "logging_steps", total)
    else:
        draft.note_fact("none", "logging_strategy", "log_every counts optimizer steps")
        draft.note_fact("off", "logging_steps")


def _saving(draft: Draft, total: int | None) -> None:
    """Set when a checkpoint is saved, and how many are kept; ``total``: the steps of the run."""
    kind = str(draft.take("save_strategy", "steps"))
    if kind == "steps":
        _every(draft, "save_every", "save_steps", total, "save_strategy")
    else:
        draft.note_fact("off", "save_steps")
        draft.set("save_every", 0, draft.origin("save_strategy"))
        texts = {
            "epoch": (
                "save_every counts optimizer steps: give those of an epoch, rows /"
                " global_batch_size; the last weights and the best evaluation's are kept in any"
                " case"
            ),
            "best": "the best evaluation's weights are kept, and the last ones too",
        }
        weights_kept = "the last weights and the best evaluation's are kept all the same"
        draft.note_fact(
            "none" if kind == "epoch" else "differs", "save_strategy", texts.get(kind, weights_kept)
        )
    limit = draft.take("save_total_limit")
    if limit and limit > 0:
        draft.set("checkpoints.keep_last", limit, draft.origin("save_total_limit"))
    elif kind == "steps" and "save_steps" in draft.facts:
        about = "save_total_limit, not given"
        draft.note(
            "differs",
            about,
            "the Trainer keeps all checkpoints, distcore the newest two and the best",
        )
    if "save_total_limit" in draft.facts and not limit:
        draft.note_fact("off", "save_total_limit")


def _every(
    draft: Draft,
    key: str,
    name: str,
    total: int | None,
    *further_facts: str,
) -> None:
    """Set ``key`` to a number of steps; below 1 it is a part of the run's ``total``."""
    value = draft.take(name)
    if value is None:
        return
    origin = draft.origin(*further_facts, name)
    if value >= 1:
        draft.set(key, int(value), origin)
    elif total and value > 0:
        # At least 1: a run of few steps would never do it.
        draft.set(key, max(1, round(value * total)), origin)
    else:
        draft.note_fact(
            "none", name, f"{key} counts optimizer steps, and those of the run are not known here"
        )


def precision(draft: Draft) -> None:
    """Set the precision of the run."""
    word = draft.take("precision")
    if word is not None:
        draft.set("precision", word, draft.origin("precision"))
    launched = draft.take("launched_precision")
    if word is None and launched not in (None, "fp32"):
        draft.set("precision", launched, draft.origin("launched_precision"))
    elif launched not in (None, "auto", word or "fp32"):
        raise ConfigError(
            f"{draft.origin('launched_precision')} says {launched}, but {draft.origin('precision')}"
            f" says {word}: make them equal or leave one out"
        )
    else:
        draft.note_fact("off", "launched_precision")


def ddp(draft: Draft) -> None:
    """Set the options of ``ddp``, where that is the strategy."""
    options: Tree = {
        "ddp_find_unused": "find_unused",
        "ddp_bucket_mb": "bucket_mb",
        "ddp_static_graph": "static_graph",
    }
    for name, option in options.items():
        value = draft.take(name)
        is_ddp = draft.values.get("strategy") == "ddp"
        if value in OFF:
            draft.note_fact("off", name)
        elif (
            is_ddp and option == "static_graph" and draft.values.get("strategy_options.find_unused")
        ):
            draft.note_fact(
                "idle",
                name,
                "torch promises nothing beside ddp_find_unused_parameters, which is kept",
            )
        elif is_ddp:
            draft.set(f"strategy_options.{option}", value, draft.origin(name))
        else:
            draft.note_fact("idle", name, "for the strategy ddp, which this is not")
