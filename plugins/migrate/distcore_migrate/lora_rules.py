"""LoRA as other trainers ask for it: facts of their keys, and the keys of ``lora``
that they come to.
"""

from __future__ import annotations

from typing import Any

from distcore_migrate.draft import OFF, Draft, Rule, fact, none, whole, written
from distcore_migrate.script import LoraDefaults

QUANTIZED = none("base weights are not quantized here: LoRA over the model's own weights")
ROWS: dict[str, Rule] = {
    "lora_r": fact("lora_rank", whole),
    "lora_rank": fact("lora_rank", whole),
    "lora_alpha": fact("lora_alpha", float),
    "lora_dropout": fact("lora_dropout", float),
    "lora_target": fact("lora_targets"),
    "lora_target_modules": fact("lora_targets"),
    "load_in_4bit": QUANTIZED,
    "load_in_8bit": QUANTIZED,
}
"""Keys that TRL, LLaMA-Factory and Axolotl share."""
EVERY_LAYER = ("all", "all-linear")


def switch(*words: Any) -> Rule:
    """Return the rule of a key that only switches LoRA on, by one of ``words``."""

    def rule(draft: Draft, name: str, value: Any) -> None:
        if value in words:
            draft.keep("lora", True, name)
            if value == "qlora":
                draft.note("none", written(name, value), "LoRA over weights that are not quantized")
        elif value in (*OFF, "full"):
            draft.note("off", name)
        else:
            draft.note(
                "none",
                written(name, value),
                "--lora trains an adapter, --freeze leaves parameters out",
            )

    return rule


PEFT = (
    "peft adapts some layers by the kind of the model, such as q_proj and v_proj; here every linear"
    " one but the head"
)


def choose(draft: Draft, defaults: LoraDefaults) -> None:
    """Set the keys of ``lora`` where it is on; ``defaults`` are the trainer's."""
    given = ("lora_rank", "lora_alpha", "lora_dropout", "lora_targets")
    no_dropout = draft.take("no_dropout", False)
    if not draft.take("lora"):
        for name in given:
            draft.note_fact("idle", name, "LoRA is off")
        return
    origin = draft.origin("lora")
    draft.set(
        "lora.rank", draft.take("lora_rank", defaults.rank), draft.origin("lora", "lora_rank")
    )
    if (value := draft.take("lora_alpha", defaults.alpha)) is not None:
        draft.set("lora.alpha", value, draft.origin("lora_alpha") or f"{origin} (default)")
    if no_dropout:
        draft.note_fact(
            "idle", "lora_dropout", f"{draft.origin('no_dropout')} takes the dropout of LoRA, too"
        )
    elif chance := draft.take("lora_dropout", defaults.dropout):
        draft.set("lora.dropout", chance, draft.origin("lora_dropout") or f"{origin} (default)")
    else:
        draft.note_fact("off", "lora_dropout")
    targets = draft.take("lora_targets")
    names = targets
    if not isinstance(targets, list):
        names = str(targets or "").replace(" ", "").split(",")
    if targets in OFF or targets in EVERY_LAYER or [*names] == ["all-linear"]:
        draft.note_fact("off", "lora_targets")
        if targets in OFF and not defaults.every_layer:
            draft.note("differs", "lora_target_modules, not given", PEFT)
    else:
        draft.set("lora.targets", list(names), draft.origin("lora_targets"))
        draft.opaque.add("lora.targets")
