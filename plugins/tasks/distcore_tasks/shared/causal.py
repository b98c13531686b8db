"""The declaration of language models: their output at a token depends on no later one."""

from __future__ import annotations

from typing import Any

from distcore import Causal
from distcore_tasks.shared.pretrained import read_config

SETTINGS: dict[str, dict[str, Any]] = {
    "xlnet": {"attn_type": "uni"},
    "xlm": {"causal": True},
    "flaubert": {"causal": True},
}
"""Keys of config.json that make a model causal, by its type."""
CALL = {"use_cache": False}
"""As the task calls a model."""
BIDIRECTIONAL = "use_bidirectional_attention"
"""A key of Gemma's config, which makes an encoder of a decoder."""


def causal(options: Any) -> Causal:
    """Return the declaration of a task with a language model; ``options`` name the model."""
    masked = "or train it with --task masked-lm"
    if options.from_scratch:
        return Causal("input_ids", masked, CALL)
    tree = read_config(options.model, options.model_folder())
    settings = SETTINGS.get(tree["model_type"], {"is_decoder": True})
    if tree.get(BIDIRECTIONAL):
        settings = {BIDIRECTIONAL: False}
    pairs = ", ".join(f'"{key}": {_json(value)}' for key, value in settings.items())
    return Causal("input_ids", f"write {pairs} into config.json of {options.model}, {masked}", CALL)


def _json(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"'
