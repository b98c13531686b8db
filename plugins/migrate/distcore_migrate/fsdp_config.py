"""FSDP as the Trainer and Accelerate ask for it: one row per key of ``fsdp_config``,
without the prefix ``fsdp_``.
"""

from __future__ import annotations

from typing import Any

from distcore_migrate.draft import (
    OFF,
    Draft,
    Rule,
    Tree,
    apply,
    fact,
    flag,
    instead,
    no_effect,
    none,
    whole,
)

OPTIONS = "strategy_options."
SHARDING = {
    "full_shard": "full",
    "1": "full",
    "shard_grad_op": "grad",
    "2": "grad",
    "no_shard": "none",
    "3": "none",
    "hybrid_shard": "hybrid",
    "4": "hybrid",
}
"""Names and numbers of FSDP1's strategies to the option ``sharding``."""
IN_TRAINER = {
    "auto_wrap": no_effect("the model's repeated blocks are wrapped unless wrap names others"),
    "offload": fact("fsdp_offload"),
}
"""Words of the Trainer's ``fsdp`` other than the sharding."""


def _reshard(draft: Draft, name: str, value: Any) -> None:
    """In FSDP2 a truth value; Accelerate also takes the names of FSDP1 there."""
    word = str(value).lower()
    draft.keep(
        "fsdp_sharding",
        {"true": "full", "false": "grad"}.get(word) or SHARDING.get(word, word),
        name,
    )


def _strategy(draft: Draft, name: str, value: Any) -> None:
    draft.keep("fsdp_sharding", SHARDING.get(str(value).lower(), str(value).lower()), name)


def _wrap_policy(draft: Draft, name: str, value: Any) -> None:
    if str(value).upper() in ("NO_WRAP", "NONE"):
        draft.note("none", f"{name} = {value}", "the model's repeated blocks are wrapped")
    else:
        draft.note(
            "idle",
            f"{name} = {value}",
            "the option wrap says it: classes, a number of parameters, or auto",
        )


def _classes(draft: Draft, name: str, value: Any) -> None:
    names = (
        value
        if isinstance(value, list)
        else [word.strip() for word in str(value or "").split(",") if word.strip()]
    )
    if names:
        draft.keep("fsdp_wrap", names, name)
    else:
        draft.note("off", name)


def _parameters(draft: Draft, name: str, value: Any) -> None:
    if value and whole(value):
        draft.keep("fsdp_wrap", whole(value), name)
    else:
        draft.note("off", name)


def _prefetch(option: str, words: tuple[str, ...]) -> Rule:
    """Gather one unit ahead where asked for; the strategy's own default does so in backward."""

    def rule(draft: Draft, name: str, value: Any) -> None:
        if str(value).lower() in words:
            draft.set(f"{OPTIONS}{option}", 1, name)
        elif value in OFF or str(value).lower() in ("false", "no_prefetch"):
            draft.note("off", name)
        else:
            draft.note("none", f"{name} = {value}", f"{option} is a number of units")

    return rule


SAVED = no_effect("checkpoints are saved and loaded by pieces, and read under any strategy")
BUILT = no_effect("the weights of a folder are read by slices")
ROWS: dict[str, Rule] = {
    "version": no_effect("the strategy is FSDP2"),
    "sharding_strategy": _strategy,
    "reshard_after_forward": _reshard,
    "offload_params": fact("fsdp_offload", flag),
    "cpu_offload": fact("fsdp_offload", flag),
    "auto_wrap_policy": _wrap_policy,
    "transformer_layer_cls_to_wrap": _classes,
    "min_num_params": _parameters,
    "backward_prefetch": _prefetch("backward_prefetch", ("backward_pre", "1")),
    "backward_prefetch_policy": _prefetch("backward_prefetch", ("backward_pre", "1")),
    "forward_prefetch": _prefetch("forward_prefetch", ("true", "1")),
    "activation_checkpointing": fact("fsdp_recompute", flag),
    "activation_checkpointing_offload": none("activations are recomputed, or kept"),
    "activation_cpu_offload": none("activations are recomputed, or kept"),
    "state_dict_type": SAVED,
    "use_orig_params": no_effect("FSDP2 has no flat parameters"),
    "limit_all_gathers": no_effect("FSDP2 has no such limit"),
    "sync_module_states": BUILT,
    "cpu_ram_efficient_loading": BUILT,
    "ignored_modules": none("freeze leaves parameters out of training"),
    "mixed_precision_policy": instead("strategy_options.param_dtype and reduce_dtype say it"),
    "xla": none("there is no XLA here; --device takes what torch.accelerator sees"),
    "xla_fsdp_v2": none("there is no XLA here; --device takes what torch.accelerator sees"),
    "xla_fsdp_settings": none("there is no XLA here; --device takes what torch.accelerator sees"),
    "xla_fsdp_grad_ckpt": none("there is no XLA here; --device takes what torch.accelerator sees"),
}


def read(draft: Draft, tree: Tree, prefix: str) -> None:
    """Put the keys of an ``fsdp_config`` into ``draft``; ``prefix`` is how the keys are
    called in the notes.
    """
    bare = {key.removeprefix("fsdp_"): value for key, value in tree.items()}
    apply(draft, ROWS, bare, "fsdp_config", prefix)


def read_words(draft: Draft, words: Any) -> None:
    """Put the words of the Trainer's ``fsdp`` into ``draft``: ``full_shard auto_wrap``,
    or a truth value.
    """
    listed = (
        [words]
        if isinstance(words, bool)
        else words
        if isinstance(words, list)
        else str(words).split()
    )
    for word in listed:
        name = str(word).lower()
        if name in SHARDING:
            draft.keep("fsdp_sharding", SHARDING[name], "fsdp")
        elif name == "hybrid_shard_zero2":
            draft.note(
                "none",
                f"fsdp = {word}",
                "written as hybrid, which frees parameters between its passes",
            )
            draft.keep("fsdp_sharding", "hybrid", "fsdp")
        elif name in ("true", "1"):
            draft.keep("fsdp_sharding", "full", "fsdp")
        elif name in IN_TRAINER:
            IN_TRAINER[name](draft, "fsdp", True if name == "offload" else word)
        else:
            draft.note("none", f"fsdp = {word}", "no word of fsdp")


def choose(draft: Draft, origin: str) -> None:
    """Set the strategy ``fsdp`` and its options; ``origin`` is the source that asks for it."""
    draft.set("strategy", "fsdp", origin)
    for name, option in (("fsdp_sharding", "sharding"), ("fsdp_wrap", "wrap")):
        if (value := draft.take(name)) is not None:
            draft.set(f"{OPTIONS}{option}", value, draft.origin(name))
    recomputes_all = draft.values.get("gradient_checkpointing")
    for name, option in (
        ("fsdp_offload", "cpu_offload"),
        ("fsdp_recompute", "activation_checkpointing"),
    ):
        if not draft.take(name):
            draft.note_fact("off", name)
        elif name == "fsdp_recompute" and recomputes_all:
            draft.note_fact("idle", name, "gradient_checkpointing recomputes all layers already")
        else:
            draft.set(f"{OPTIONS}{option}", True, draft.origin(name))
    if draft.values.get("precision") in ("bf16", "fp16"):
        for option in ("param_dtype", "reduce_dtype"):
            draft.set(
                f"{OPTIONS}{option}",
                "precision",
                f"{draft.origins['precision']}, as FSDP of Accelerate does",
            )
