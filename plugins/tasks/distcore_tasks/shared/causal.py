"""The declaration of language models: their output at a token depends on no later one."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from distcore import Causal
from distcore.model import silence_transformers
from distcore_tasks.shared.position_table import make_small
from distcore_tasks.shared.pretrained import read_config

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

SETTINGS: dict[str, dict[str, Any]] = {
    "xlnet": {"attn_type": "uni"},
    "xlm": {"causal": True},
    "flaubert": {"causal": True},
}
"""Keys of config.json that make a model causal, by its type."""
CALL = {"use_cache": False}
"""As the task calls a model."""
TOKENS = 16
"""Length of the row that a small model reads, and the size of its vocabulary but
for the padding token.
"""
MOST_PARAMETERS = 2**26
"""Most parameters of one layer that is measured before a run: a quarter of a GiB, and
less than a second.
"""
LOOKS_BACK = {"use_bidirectional_attention": False, "is_causal": True}
"""Keys that can make an encoder of a decoder, Gemma's and any other's, and where they do not."""


def causal(options: Any) -> Causal:
    """Return the declaration of a task with a language model; ``options`` name the model."""
    masked = "or train it with --task masked-lm"
    if options.from_scratch:
        return Causal("input_ids", masked, CALL)
    folder = options.model_folder()
    tree = read_config(options.model, folder)
    settings = SETTINGS.get(tree["model_type"], {"is_decoder": True})
    changes = {}
    for key, usual in LOOKS_BACK.items():
        if bool(tree.get(key, usual)) != usual:
            changes[key] = usual
    if changes:
        settings = changes
    pairs = ", ".join(f'"{key}": {_json(value)}' for key, value in settings.items())
    advice = f"write {pairs} into config.json of {options.model}, {masked}"
    return Causal("input_ids", advice, CALL, small=partial(small_decoder, folder))


def small_decoder(folder: Path) -> tuple[nn.Module, Tensor] | None:
    """Return a model of the type and settings in ``folder`` with one layer, random weights and few
    tokens, and a row.

    Returns ``None`` if one layer is too large for the machine on which a job is only described.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with silence_transformers():
        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
        config.pad_token_id = 0  # it may be the last one of a large vocabulary
        make_small(config, tokens=TOKENS)
        auto: Any = AutoModelForCausalLM
        with torch.device("meta"):
            layer = auto.from_config(config)
        if sum(parameter.numel() for parameter in layer.parameters()) > MOST_PARAMETERS:
            return None
        torch.manual_seed(0)
        return auto.from_config(config), torch.arange(1, TOKENS + 1)[None]


def _json(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"'
