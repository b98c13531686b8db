"""How many tokens fit into a model's table of positions, measured by two short rows."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distcore.model import silence_transformers

if TYPE_CHECKING:
    from torch import nn

SHORT = 3
"""Tokens of the first row; the second has one more."""
Lookup = tuple[int, int]
"""Rows of a table, and the largest row that a text looked up."""


def measure_positions(folder: Path) -> int | None:
    """Return how many tokens the positions of the model in ``folder`` suffice for.

    Where a model numbers its first token is nowhere in its config: RoBERTa and others begin behind
    the padding token. Returns ``None`` for a model without a table of positions, and for one that
    cannot be built with a single layer.
    """
    return _measured(folder, (folder / "config.json").read_text(encoding="utf-8"))


@lru_cache
def _measured(folder: Path, _config: str) -> int | None:
    """Return the result of ``measure_positions``; ``_config`` is part of the cache's key."""
    # A model with code or settings of its own may refuse any step of this; it is then
    # judged by its config.
    with silence_transformers(), suppress(Exception):
        from transformers import AutoConfig, AutoModel

        config: Any = AutoConfig.from_pretrained(folder, local_files_only=True)
        pad = config.pad_token_id or 0
        make_small(config, tokens=1)
        auto: Any = AutoModel
        model = auto.from_config(config).eval()
        token = 0 if pad else 1
        shorter = _lookups(model, token, SHORT)
        longer = _lookups(model, token, SHORT + 1)
        return _tokens_that_fit(shorter, longer)
    return None


def make_small(config: Any, tokens: int) -> None:
    """Leave one layer, and ``tokens`` tokens behind that of padding.

    The table of positions keeps its size.
    """
    layers = getattr(config, "num_hidden_layers", None)
    for name, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == layers:  # a setting of each layer
            setattr(config, name, value[:1])
    for name in ("num_hidden_layers", "encoder_layers", "decoder_layers"):
        if hasattr(config, name):
            setattr(config, name, 1)
    config.vocab_size = min(config.vocab_size, (config.pad_token_id or 0) + 1 + tokens)


def _lookups(model: nn.Module, token: int, length: int) -> list[Lookup]:
    """Return what a row of ``length`` equal tokens looks up in tables, in order."""
    import torch
    from torch.overrides import TorchFunctionMode

    lookups: list[Lookup] = []

    class Recorder(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            """Record the call if it looks up rows of tokens, and make it."""
            if func is torch.nn.functional.embedding:
                rows, table = args[:2]
                # Distances between tokens, which are no limit, are looked up for pairs of tokens.
                if rows.dim() == 1 or (rows.dim() == 2 and len(rows) == 1):
                    lookups.append((len(table), int(rows.max())))
            return func(*args, **(kwargs or {}))

    owner: Any = model
    row = torch.full((1, length), token)
    inputs = {"input_ids": row, "attention_mask": torch.ones_like(row)}
    if owner.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = row
    with torch.no_grad(), Recorder():
        owner(**inputs)
    return lookups


def _tokens_that_fit(shorter: list[Lookup], longer: list[Lookup]) -> int | None:
    """Return the tokens for which the smallest table of positions suffices; ``None`` without one.

    A table of positions is one in which one token more looks up one row more.
    """
    sizes = [
        rows - 1 - largest + SHORT
        for (rows, largest), (_, next_largest) in zip(shorter, longer, strict=True)
        if next_largest == largest + 1
    ]
    return min(sizes, default=None)
