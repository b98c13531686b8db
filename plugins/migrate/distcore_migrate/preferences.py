"""Preference tuning and reward models, as TRL, LLaMA-Factory and Axolotl name their
losses, options and columns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from distcore_migrate.draft import Draft, Rule, Tree, fact, flag, instead, no_effect, none, to
from distcore_migrate.script import LoraDefaults, Script

LOSSES = {
    "sigmoid": "dpo",
    "dpo": "dpo",
    "ipo": "ipo",
    "hinge": "hinge",
    "kto_pair": "kto",
    "kto": "kto",
}
"""Names of losses to ``loss`` of the task ``preference``."""
TEXTS = (
    "a row has the texts prompt, chosen and rejected: of conversations write the texts, with the"
    " turns that both answers share as the prompt; columns.prompt, columns.chosen and"
    " columns.rejected name other columns"
)
PAIRS = (
    "kto takes both answers of a row, the chosen one as desirable: of rows with completion and"
    " label, put a good and a bad answer to one prompt into a row"
)
OWN_TASK = "the loss of a task of your own may do it"
REFERENCE = no_effect(
    "the reference is a frozen model, sharded as the trained one; with LoRA it is the base"
)
PADDED = no_effect("padding takes no part in the loss")
CUT = none("max_seq_len is for a prompt with its answer, whose end is cut")
WEIGHT = none("both answers of a row count the same", off=(1, 1.0))
LOSS = none(OWN_TASK, off=(0, 0.0, "reverse_kl"))


def _dropout(draft: Draft, name: str, value: Any) -> None:
    draft.set("task_options.dropout", 0.0 if flag(value) else None, name)
    draft.keep("no_dropout", flag(value), name)


PAIR_ROWS: dict[str, Rule] = {
    "disable_dropout": _dropout,
    "max_prompt_length": CUT,
    "max_completion_length": CUT,
    "truncation_mode": none("the end of an answer is cut", off=("keep_start",)),
    "generate_during_eval": instead(
        "evaluation judges the answers of its rows; distcore predict does so for a file"
    ),
} | dict.fromkeys(("pad_to_multiple_of", "padding_value", "label_pad_token_id"), PADDED)
PREFERENCE_ROWS: dict[str, Rule] = (
    PAIR_ROWS
    | dict.fromkeys(("loss_type", "pref_loss"), fact("loss_type"))
    | dict.fromkeys(("beta", "pref_beta", "rl_beta"), to("task_options.beta", float))
    | dict.fromkeys(
        ("label_smoothing", "dpo_label_smoothing"), to("task_options.label_smoothing", float)
    )
    | {"ref_model": to("task_options.reference", str)}
    | dict.fromkeys(
        ("precompute_ref_log_probs", "precompute_ref_batch_size", "use_logits_to_keep"), REFERENCE
    )
    | dict.fromkeys(
        (
            "desirable_weight",
            "undesirable_weight",
            "kto_chosen_weight",
            "kto_rejected_weight",
            "kto_desirable_weight",
            "kto_undesirable_weight",
        ),
        WEIGHT,
    )
    | dict.fromkeys(
        (
            "rpo_alpha",
            "pref_ftx",
            "ld_alpha",
            "use_weighting",
            "dpo_use_weighting",
            "reference_free",
            "sync_ref_model",
            "f_divergence_type",
            "loss_weights",
            "discopop_tau",
        ),
        LOSS,
    )
)
REWARD_ROWS: dict[str, Rule] = PAIR_ROWS | {
    "center_rewards_coefficient": to("task_options.center", float)
}
REWARDS = ("reward", "rm")
KINDS = ("dpo", "ipo", "kto")
"""Kinds of training on preferences that the task does, each named after its loss unless
a key names another.
"""


def is_shipped(kind: str) -> bool:
    """Return True for a kind of training that ``preference`` or ``reward-model`` does."""
    return kind in KINDS or kind in REWARDS


def script_of(
    kind: str, rows: dict[str, Rule], lora: LoraDefaults, defaults: Tree, names: tuple[str, str]
) -> Script:
    """Return the script of a shipped kind, with rows and defaults of its library; ``names``:
    its loss and beta.
    """
    if kind in REWARDS:
        return Script(
            task="reward-model",
            rows=rows | REWARD_ROWS,
            lora=lora,
            defaults=defaults,
            differs=(TEXTS,),
        )
    return Script(
        task="preference",
        rows=rows | PREFERENCE_ROWS,
        lora=lora,
        defaults=defaults | {names[0]: kind, names[1]: 0.1},
        differs=(TEXTS, PAIRS) if kind == "kto" else (TEXTS,),
    )


def settled(draft: Draft, script: Script | None) -> Script | None:
    """Set the loss. Return the script, with a task of the user's where no shipped
    task has its loss.
    """
    if script is None or (word := draft.take("loss_type")) is None:
        return script
    name = "_".join(map(str, word)) if isinstance(word, list) else str(word)
    if name in LOSSES:
        draft.set("task_options.loss", LOSSES[name], draft.origin("loss_type"))
        return script
    draft.note_fact(
        "none", "loss_type", "losses of the task preference: dpo (sigmoid), ipo, hinge, kto"
    )
    return replace(script, task=f"{name}.py:{name.upper()}", needs_task=True)
