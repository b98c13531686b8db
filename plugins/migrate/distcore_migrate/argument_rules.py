"""Rules for arguments of TrainingArguments that several words or values share."""

from __future__ import annotations

from typing import Any

from distcore_migrate.draft import OFF, Draft, Rule, flag, written

OPTIMIZERS = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "adamw_apex_fused": "adamw",
    "adamw_torch_xla": "adamw",
    "adamw_torch_npu_fused": "adamw",
    "sgd": "sgd",
    "adafactor": "adafactor",
    "lion_32bit": "lion",
    "paged_lion_32bit": "lion",
}
"""``optim`` to ``optimizer.name``."""
EIGHT_BITS = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit")
"""``optim`` that are AdamW with moments in 8 bits."""
TRACKERS = {name: name for name in ("tensorboard", "wandb", "mlflow")}
"""``report_to`` to the extension that does it."""
LEVELS = {
    "debug": "debug",
    "info": "info",
    "warning": "warning",
    "error": "error",
    "critical": "error",
}


def optimizer(draft: Draft, name: str, value: Any) -> None:
    """Set the optimizer of the same mathematics, or say which there are."""
    if value in OPTIMIZERS:
        draft.set("optimizer.name", OPTIMIZERS[value], name)
    elif value in EIGHT_BITS:
        draft.note(
            "instead",
            written(name, value),
            "left at the default, adamw; --optimizer adamw8bit keeps its moments in 8 bits",
        )
    else:
        optimizers = ", ".join(sorted(set(OPTIMIZERS.values())))
        draft.note(
            "none",
            written(name, value),
            f"left at the default, adamw; of the Trainer's, here are {optimizers}",
        )
    if value == "adafactor":
        draft.note(
            "differs",
            written(name, value),
            "torch's, whose steps are relative to the size of the weights; "
            "those of the Trainer's are not: try a larger lr",
        )


def trackers(draft: Draft, name: str, value: Any) -> None:
    """Switch on the extension of each tracker that is asked for, or say which there are."""
    words = value if isinstance(value, list) else [value]
    names = [word for word in words if word not in OFF]
    if not names:
        draft.note("off", name)
    for word in names:
        if word in TRACKERS:
            draft.set(f"extensions.{TRACKERS[word]}", True, name)
        else:
            draft.note(
                "none",
                written(name, word),
                f"trackers here: {', '.join(TRACKERS)}, and extensions of your own",
            )


def deepspeed(draft: Draft, name: str, value: Any) -> None:
    """Keep the file or tree.

    Without a value it is DeepSpeed's switch, and ``deepspeed_config`` names the file.
    """
    if value in OFF or value is True:
        draft.note("off", name)
    else:
        draft.keep("deepspeed", value, name)


def level(key: str) -> Rule:
    """Return the rule that sets ``key`` to the log level of the same name."""

    def rule(draft: Draft, name: str, value: Any) -> None:
        if value in LEVELS:
            draft.set(key, LEVELS[value], name)
        else:
            draft.note("off", name)

    return rule


def on(key: str, wanted: Any) -> Rule:
    """Return the rule that sets ``key`` to ``wanted`` where the argument is on."""

    def rule(draft: Draft, name: str, value: Any) -> None:
        if value in OFF or not flag(value):
            draft.note("off", name)
        else:
            draft.set(key, wanted, name)

    return rule


def compiled(draft: Draft, name: str, value: Any) -> None:
    """Switch compiling on, as a backend or a mode does; say of any but the default
    that there is none.
    """
    if value in OFF:
        draft.note("off", name)
        return
    draft.set("compile", "on", name)
    if value not in ("inductor", "default"):
        draft.note(
            "none", written(name, value), "compile compiles with inductor, in its default mode"
        )


def sampling(draft: Draft, name: str, value: Any) -> None:
    """Set the length window for sampling by length; say of any other that rows are shuffled."""
    if value == "group_by_length":
        draft.set("loader.length_grouping", "window", name)
    elif value == "random":
        draft.note("off", name)
    else:
        draft.note("none", written(name, value), "rows are shuffled anew in each epoch")


def precision(word: str) -> Rule:
    """Return the rule that proposes precision ``word`` where the argument is on."""

    def rule(draft: Draft, name: str, value: Any) -> None:
        if value in OFF or not flag(value):
            draft.note("off", name)
        else:
            draft.keep("precision", word, name)

    return rule
