"""The keys of a model folder's generation_config.json: who honors each, and which are refused.

Each key of transformers' ``GenerationConfig`` stands in one of these sets; a test fails for one
that stands in none.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distcore import ConfigError, ModelError, nearest
from distcore.model import silence_transformers

if TYPE_CHECKING:
    from torch import nn

FILE = "generation_config.json"
SEARCH = frozenset(
    {
        "use_cache", "num_beams", "early_stopping", "length_penalty", "renormalize_logits",
        "remove_invalid_values", "suppress_tokens", "begin_suppress_tokens", "forced_eos_token_id",
        "min_new_tokens", "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id",
    }
)  # fmt: skip
"""transformers honors them, and a row's answer does not depend on the padding beside it."""
READS_PROMPT = frozenset(
    {
        "min_length", "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids",
        "sequence_bias", "forced_bos_token_id", "exponential_decay_length_penalty",
    }
)  # fmt: skip
"""transformers honors them, but reads or counts padding, too: with them, rows of one
length are generated together.
"""
READS_SOURCE = frozenset(("encoder_no_repeat_ngram_size", "encoder_repetition_penalty"))
"""As ``READS_PROMPT``, but they read what an encoder reads, where there is one."""
SAMPLING = frozenset(
    {
        "do_sample", "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p",
        "epsilon_cutoff", "eta_cutoff",
    }
)  # fmt: skip
"""Draws of tokens. Generation is greedy here, so that evaluations can be compared; then
these have no effect.
"""
LENGTH = frozenset(("max_length", "max_new_tokens"))
"""The task option ``max_new_tokens`` says how long a text may be."""
SPEED = frozenset(
    {
        "use_mtp", "cache_implementation", "cache_config", "max_cache_len",
        "prompt_lookup_num_tokens", "max_matching_ngram_size", "is_assistant",
        "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold",
        "assistant_early_exit", "assistant_lookbehind", "target_lookbehind", "speculation_type",
        "low_memory", "prefill_chunk_size", "compile_config", "disable_compile",
        "continuous_batching_config",
    }
)  # fmt: skip
"""They change speed and memory, not a greedy text: it is the same without them,
and they are off.
"""
FORM = frozenset(
    {
        "return_dict_in_generate", "output_attentions", "output_hidden_states", "output_scores",
        "output_logits",
    }
)  # fmt: skip
"""What transformers returns beside the tokens, of which nothing is used."""
UNREAD = frozenset(("_from_model_config", "transformers_version", "diversity_penalty"))
"""Nothing reads them; ``diversity_penalty`` belongs to ``num_beam_groups``."""
REFUSED: Mapping[str, tuple[object, str]] = {
    "stop_strings": (
        None,
        "a text ends at the tokens of eos_token_id alone; make the end of an answer such a token",
    ),
    "num_return_sequences": (1, "each row has one text"),
    "num_beam_groups": (1, "transformers has no group beam search any more; use num_beams"),
    "constraints": (None, "transformers has no constrained beam search any more"),
    "force_words_ids": (None, "transformers has no constrained beam search any more"),
    "penalty_alpha": (0, "transformers has no contrastive search any more"),
    "dola_layers": (None, "transformers has no DoLa decoding any more"),
    "assistant_ensemble_weight": (None, "there is no assistant model"),
    "max_time": (
        None,
        "a text would depend on the speed of the machine; use task_options.max_new_tokens",
    ),
    "token_healing": (False, "it rewrites the end of a prompt"),
    "guidance_scale": (1, "it needs a second prompt for each row"),
    "watermarking_config": (None, "a watermark belongs to what serves the model"),
}
"""Keys that change a text and cannot be honored: the value without effect, and the reason."""
ONE_TOKEN = ("decoder_start_token_id", "forced_bos_token_id")
"""Keys of which transformers takes the first token of a list for every text."""
KEYS = (
    SEARCH
    | READS_PROMPT
    | READS_SOURCE
    | SAMPLING
    | LENGTH
    | SPEED
    | FORM
    | UNREAD
    | REFUSED.keys()
)
NEUTRAL: Mapping[str, object] = {
    "min_length": 0,
    "repetition_penalty": 1,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
}
"""Values without effect, beside null, of the keys that read a prompt or a source."""
OF_TEXT = READS_PROMPT | {
    "num_beams", "suppress_tokens", "begin_suppress_tokens", "forced_eos_token_id",
    "min_new_tokens",
}  # fmt: skip
"""Keys by which a greedy text can be another one, besides its ends and those of a source."""
WITHOUT_CACHE = ("prophetnet", "rwkv")
"""Model types whose cache transformers gets wrong: ProphetNet's fails, and RWKV's mixes the
rows of a batch.
"""


def folder_settings(name: str, folder: Path) -> dict[str, Any]:
    """Return the settings of the model in ``folder`` that are set: of its file,
    else of its config.json.
    """
    from distcore_tasks.shared.pretrained import one_line_errors

    with silence_transformers(), one_line_errors(f"model {name}: {FILE} cannot be read"):
        from transformers import AutoConfig, GenerationConfig

        made: Any = GenerationConfig
        if (folder / FILE).is_file():
            config = made.from_pretrained(folder)
        else:
            config = made.from_model_config(
                AutoConfig.from_pretrained(folder, local_files_only=True)
            )
    return {key: value for key, value in vars(config).items() if value is not None}


def check_settings(name: str, folder: Path | None, changes: Mapping[str, Any]) -> None:
    """Raise ModelError or ConfigError, one line, for a setting that would change a text
    and cannot be honored.

    ``folder``: that of the model; ``None`` for a built-in one. ``changes``: the option
    ``generation``, which comes before what the folder says.
    """
    for key, value in changes.items():
        _check_change(key, value)
    said = {} if folder is None else folder_settings(name, folder)
    for key, value in said.items():
        if key not in changes and (problem := _problem(key, value)):
            way_out = f"leave it out by --set task_options.generation.{key}=null"
            raise ModelError(f"model {name}: {FILE}: {key} = {value!r}: {problem}; {way_out}")


def _check_change(key: str, value: object) -> None:
    """Raise ConfigError for an entry of the option ``generation`` that has no
    effect or cannot be honored.
    """
    where = f"task_options.generation.{key}"
    if key not in KEYS:
        raise ConfigError(
            f"{where}: is no setting of transformers' GenerationConfig{nearest(key, KEYS)}"
        )
    if key in LENGTH:
        raise ConfigError(
            f"{where}: --set task_options.max_new_tokens=N says how long a text may be"
        )
    if value is not None and key in SAMPLING:
        raise ConfigError(
            f"{where} = {value!r}: generation is greedy, so it has no effect; leave it out"
        )
    if problem := _problem(key, value):
        raise ConfigError(f"{where} = {value!r}: {problem}; leave it out")


def _problem(key: str, value: object) -> str | None:
    """Return why this setting cannot be honored; ``None`` if it can, or has no effect."""
    if value is None:
        return None
    if key in REFUSED:
        neutral, reason = REFUSED[key]
        return None if value == neutral else reason
    if key == "cache_implementation" and value == "quantized":
        return "a cache in few bits changes the text"
    if key in ONE_TOKEN and isinstance(value, list) and len(value) != 1:
        return "all texts begin with one token"
    if key == "num_beams" and (not isinstance(value, int) or value < 1):
        return "a number of beams is 1 or more"
    return None


def current_settings(model: nn.Module, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the model with those ``changes``."""
    owner: Any = model
    return dict(vars(owner.generation_config)) | dict(changes)


def reads_padding(settings: Mapping[str, Any], *, has_encoder: bool) -> bool:
    """Return True if a text would depend on the padding of its row.

    That of a source, if there is an encoder: a decoder's rows have no padding then.
    """
    keys = READS_SOURCE if has_encoder else READS_SOURCE | READS_PROMPT
    return any(settings.get(key) not in (None, NEUTRAL.get(key)) for key in keys)


def ends_of(settings: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end a text."""
    ends = settings.get("eos_token_id")
    if ends is None:
        return []
    return [int(end) for end in ends] if isinstance(ends, list | tuple) else [int(ends)]


def settings_of_text(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return those settings by which a greedy text can be another one, besides its ends."""
    neutral = {"num_beams": 1, "min_new_tokens": 0, **NEUTRAL}
    changed = {key: settings.get(key) for key in sorted(OF_TEXT)}
    return {
        key: value for key, value in changed.items() if value not in (None, [], neutral.get(key))
    }


def greedy_arguments(model: nn.Module, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``generate()`` for these changes, greedily: what is only
    speed or form is off.
    """
    defaults = _defaults()
    arguments: dict[str, Any] = {
        key: defaults[key] for key in SPEED | REFUSED.keys() if key in defaults
    }
    arguments |= dict.fromkeys(FORM, False)
    arguments["do_sample"] = False
    owner: Any = model
    if owner.config.model_type in WITHOUT_CACHE:
        arguments["use_cache"] = False
    # Some settings have no null in transformers: its own default takes the place.
    return arguments | {
        key: defaults[key] if value is None else value for key, value in changes.items()
    }


def _defaults() -> dict[str, Any]:
    """Return what transformers takes for each setting that neither a folder nor a call names."""
    from transformers import GenerationConfig

    made: Any = GenerationConfig
    plain = dict(vars(made()))
    # Since transformers 5 a config has null for what is not set; older ones have
    # the defaults themselves.
    return plain | (
        made._get_default_generation_params()
        if hasattr(made, "_get_default_generation_params")
        else {}
    )


def add_ends(model: nn.Module, ends: list[int]) -> None:
    """Let texts of ``model`` also end at the tokens that end an answer in training.

    An export carries them. transformers' Trainer does the same with the end token of its tokenizer.
    """
    owner: Any = model
    before = ends_of(vars(owner.generation_config))
    missing = [end for end in ends if end not in before]
    if missing:
        both = [*missing, *before]
        change_settings(model, {"eos_token_id": both if len(both) > 1 else both[0]})


def change_settings(model: nn.Module, changes: Mapping[str, Any]) -> None:
    """Set these settings in the model's generation config, which an export carries.

    transformers refuses to save a changed config with settings that it only warns of in an
    unchanged one, such as a temperature without sampling. Published folders have such, so the
    config passes for unchanged.
    """
    owner: Any = model
    config = owner.generation_config
    for key, value in changes.items():
        setattr(config, key, value)
    config._original_object_hash = hash(config)
