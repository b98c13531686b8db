"""Translate the FSDP settings of the Trainer and of Accelerate into the strategy ``fsdp``.

``ROWS`` has a rule for each key of ``fsdp_config``, without the prefix ``fsdp_``.
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
"""Map names and numbers of FSDP1's sharding strategies to values of the option ``sharding``."""
_RESHARDING = {"true": "full", "false": "grad"}
"""The same for FSDP2's ``reshard_after_forward``, which is a truth value."""
IN_TRAINER = {
    "auto_wrap": no_effect("the model's repeated blocks are wrapped unless wrap names others"),
    "offload": fact("fsdp_offload"),
}
"""Rules for the words of the Trainer's ``fsdp`` that are no sharding."""


def _reshard(draft: Draft, name: str, value: Any) -> None:
    """Keep the sharding that FSDP2's key asks for; Accelerate also takes FSDP1's names there."""
    word = str(value).lower()
    sharding_by_word = SHARDING | _RESHARDING
    draft.keep("fsdp_sharding", sharding_by_word.get(word, word), name)


def _strategy(draft: Draft, name: str, value: Any) -> None:
    """Keep the sharding that FSDP1's key asks for; an unknown name is kept as it is."""
    word = str(value).lower()
    draft.keep("fsdp_sharding", SHARDING.get(word, word), name)


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
    """Wrap the classes of a list, or of a text with commas between them."""
    if isinstance(value, list):
        names = value
    else:
        words = [word.strip() for word in str(value or "").split(",")]
        names = [word for word in words if word]
    if names:
        draft.keep("fsdp_wrap", names, name)
    else:
        draft.note("off", name)


def _parameters(draft: Draft, name: str, value: Any) -> None:
    """Wrap modules of at least so many parameters; 0 wraps by no number."""
    parameters = whole(value) if value else 0
    if parameters:
        draft.keep("fsdp_wrap", parameters, name)
    else:
        draft.note("off", name)


def _prefetch(option: str, words: tuple[str, ...]) -> Rule:
    """Return the rule that gathers one unit ahead where the value is one of ``words``.

    A key that is off sets nothing: the strategy's default already gathers ahead in backward.
    """

    def rule(draft: Draft, name: str, value: Any) -> None:
        word = str(value).lower()
        if word in words:
            draft.set(f"{OPTIONS}{option}", 1, name)
        elif value in OFF or word in ("false", "no_prefetch"):
            draft.note("off", name)
        else:
            draft.note("none", f"{name} = {value}", f"{option} is a number of units")

    return rule


SAVED = no_effect("checkpoints are saved and loaded by pieces, and read under any strategy")
"""The rule of keys that say how checkpoints are written."""
BUILT = no_effect("the weights of a folder are read by slices")
"""The rule of keys that say how ranks come by the first weights."""
_BACKWARD_PREFETCH = _prefetch("backward_prefetch", ("backward_pre", "1"))
_RECOMPUTED_OR_KEPT = none("activations are recomputed, or kept")
_NO_XLA = none("there is no XLA here; --device takes what torch.accelerator sees")
ROWS: dict[str, Rule] = {
    "version": no_effect("the strategy is FSDP2"),
    "sharding_strategy": _strategy,
    "reshard_after_forward": _reshard,
    "offload_params": fact("fsdp_offload", flag),
    "cpu_offload": fact("fsdp_offload", flag),
    "auto_wrap_policy": _wrap_policy,
    "transformer_layer_cls_to_wrap": _classes,
    "min_num_params": _parameters,
    "backward_prefetch": _BACKWARD_PREFETCH,
    "backward_prefetch_policy": _BACKWARD_PREFETCH,
    "forward_prefetch": _prefetch("forward_prefetch", ("true", "1")),
    "activation_checkpointing": fact("fsdp_recompute", flag),
    "activation_checkpointing_offload": _RECOMPUTED_OR_KEPT,
    "activation_cpu_offload": _RECOMPUTED_OR_KEPT,
    "state_dict_type": SAVED,
    "use_orig_params": no_effect("FSDP2 has no flat parameters"),
    "limit_all_gathers": no_effect("FSDP2 has no such limit"),
    "sync_module_states": BUILT,
    "cpu_ram_efficient_loading": BUILT,
    "ignored_modules": none("freeze leaves parameters out of training"),
    "mixed_precision_policy": instead("strategy_options.param_dtype and reduce_dtype say it"),
    "xla": _NO_XLA,
    "xla_fsdp_v2": _NO_XLA,
    "xla_fsdp_settings": _NO_XLA,
    "xla_fsdp_grad_ckpt": _NO_XLA,
}


def read(draft: Draft, tree: Tree, prefix: str) -> None:
    """Put the keys of an ``fsdp_config`` into ``draft``; in notes each key has ``prefix`` before
    its name.
    """
    # Files have the same keys with the prefix and without.
    bare = {key.removeprefix("fsdp_"): value for key, value in tree.items()}
    apply(draft, ROWS, bare, "fsdp_config", prefix)


def read_words(draft: Draft, words: Any) -> None:
    """Put the words of the Trainer's ``fsdp`` into ``draft``: ``full_shard auto_wrap``,
    or a truth value.
    """
    listed: list[Any]
    if isinstance(words, bool):
        listed = [words]
    elif isinstance(words, list):
        listed = words
    else:
        listed = str(words).split()
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
            # The fact that parameters are offloaded is a truth value, and not the word for it.
            value = True if name == "offload" else word
            IN_TRAINER[name](draft, "fsdp", value)
        else:
            draft.note("none", f"fsdp = {word}", "no word of fsdp")


def choose(draft: Draft, origin: str) -> None:
    """Set the strategy ``fsdp`` and its options; ``origin`` is the source that asks for it."""
    draft.set("strategy", "fsdp", origin)
    for name, option in (("fsdp_sharding", "sharding"), ("fsdp_wrap", "wrap")):
        value = draft.take(name)
        if value is not None:
            draft.set(f"{OPTIONS}{option}", value, draft.origin(name))
    _switch_on(draft, "fsdp_offload", "cpu_offload")
    recomputes_all = draft.values.get("gradient_checkpointing")
    if recomputes_all and draft.take("fsdp_recompute"):
        why = "gradient_checkpointing recomputes all layers already"
        draft.note_fact("idle", "fsdp_recompute", why)
    else:
        _switch_on(draft, "fsdp_recompute", "activation_checkpointing")
    if draft.values.get("precision") in ("bf16", "fp16"):
        origin_of_dtypes = f"{draft.origins['precision']}, as FSDP of Accelerate does"
        for option in ("param_dtype", "reduce_dtype"):
            draft.set(f"{OPTIONS}{option}", "precision", origin_of_dtypes)


def _switch_on(draft: Draft, name: str, option: str) -> None:
    """Set a truth value of the strategy if the fact ``name`` is true; note a fact that is false."""
    if draft.take(name):
        draft.set(f"{OPTIONS}{option}", True, draft.origin(name))
    else:
        draft.note_fact("off", name)
