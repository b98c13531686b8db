"""Rows that are generated together, so that each has the text that it has alone.

Every rank makes equally many calls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from distcore.model import silence_transformers
from distcore_tasks.shared.generation.settings import (
    current_settings,
    ends_of,
    greedy_arguments,
    reads_padding,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from distcore import Ragged

Write = Callable[["Tensor", "Tensor"], "Tensor"]
"""Return the new tokens, int64 ``(n, new)``, of rows of tokens and their mask.

Both are int64 ``(n, longest)``.
"""
SHIFT = 3
"""Padding tokens before the row that measures padding."""
ROUNDING = {"float32": 1e-3, "float64": 1e-6}
"""Part of the scores' spread by which padding may change them, by dtype; more is not rounding."""
HALF_ROUNDING = 0.05
"""The same of 16 bits."""

_MEASURED: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def continue_prompts(
    model: nn.Module,
    prompts: Tensor,
    mask: Tensor,
    most: int,
    changes: Mapping[str, Any],
    in_step: bool,
) -> Ragged:
    """Return the new tokens of each row, without the end: those that the row alone would get.

    ``prompts``: tokens padded on the left, int64 ``(n, longest)``. A row whose mask is all zeros
    gets none.
    """
    caller: Any = model
    settings = current_settings(model, changes)
    arguments = greedy_arguments(model, changes)
    arguments |= {"max_new_tokens": most, "synced_gpus": in_step, "pad_token_id": filler(settings)}

    def write(tokens: Tensor, row_mask: Tensor) -> Tensor:
        texts: Tensor = caller.generate(tokens, attention_mask=row_mask, **arguments)
        return texts[:, tokens.shape[1] :]

    apart = reads_padding(settings, has_encoder=False) or not _can_pad_left(model, in_step)
    return write_rows(write, prompts, mask, settings, apart=apart, in_step=in_step, left=True)


def answer_sources(
    model: nn.Module,
    sources: Tensor,
    mask: Tensor,
    most: int,
    changes: Mapping[str, Any],
    in_step: bool,
) -> Ragged:
    """Return the tokens that an encoder-decoder writes for each source, as for it alone.

    They are without start and end. ``sources``: tokens padded on the right, int64 ``(n, longest)``.
    """
    from transformers.modeling_outputs import BaseModelOutput

    caller: Any = model
    settings = current_settings(model, changes)
    arguments = greedy_arguments(model, changes)
    arguments |= {"max_new_tokens": most, "synced_gpus": in_step, "pad_token_id": filler(settings)}

    def write(tokens: Tensor, row_mask: Tensor) -> Tensor:
        """Return the new tokens of each source."""
        # Runs the encoder by a call of the whole model: generate() would call the encoder alone,
        # whose weights may be sharded. The decoder gets any token, because its result is not used.
        any_token = tokens.new_zeros(len(tokens), 1)
        whole = caller(
            input_ids=tokens, attention_mask=row_mask, decoder_input_ids=any_token, use_cache=False
        )
        encoded = BaseModelOutput(last_hidden_state=whole.encoder_last_hidden_state)
        encoded.router_logits = None  # mixtures of experts ask their encoder for it
        # The tokens of the source, too, because some settings compare the text with them.
        texts: Tensor = caller.generate(
            tokens, encoder_outputs=encoded, attention_mask=row_mask, **arguments
        )
        return texts[:, 1:]  # without the start token

    apart = reads_padding(settings, has_encoder=True)
    return write_rows(write, sources, mask, settings, apart=apart, in_step=in_step)


def write_rows(
    write: Write,
    tokens: Tensor,
    mask: Tensor,
    settings: Mapping[str, Any],
    *,
    apart: bool,
    in_step: bool,
    left: bool = False,
) -> Ragged:
    """Return what ``write`` makes of each row, up to its end.

    ``apart``: rows of one length are written together, without padding; else all of them.
    ``in_step``: ``write`` is called equally often on each rank.
    """
    import torch

    from distcore import Ragged

    lengths = mask.sum(1)
    groups = _groups(lengths, apart)
    ends = ends_of(settings)
    texts = [tokens.new_empty(0)] * len(tokens)
    # Agreed on before the first call, in which ranks wait for each other.
    calls = _most_calls(len(groups), tokens) if in_step else len(groups)
    with silence_transformers():
        for group in groups:
            longest = int(lengths[group].max())
            columns = slice(tokens.shape[1] - longest, None) if left else slice(longest)
            written = write(tokens[group, columns], mask[group, columns])
            for row, new_tokens in zip(group.tolist(), written, strict=True):
                texts[row] = _before_end(new_tokens, ends)
        for _ in range(calls - len(groups)):
            # Another rank has more to write, and needs this rank's part of the weights.
            write(tokens.new_zeros(1, 1), mask.new_ones(1, 1))
    sizes = torch.tensor([len(text) for text in texts], device=tokens.device)
    return Ragged(torch.cat([tokens.new_empty(0), *texts]), sizes)


def filler(settings: Mapping[str, Any]) -> int:
    """Return a token for the places after the end of a text, which nobody reads."""
    pad = settings.get("pad_token_id")
    return int(pad) if pad is not None else next(iter(ends_of(settings)), 0)


def texts_of(tokenizer: Any, rows: Any, *, special: bool, also: Collection[int] = ()) -> list[str]:
    """Return the text of each row of tokens.

    ``special``: with the tokenizer's special tokens. ``also``: tokens that are special, too, and
    that the tokenizer does not count as such.
    """
    hidden = () if special else also
    texts = []
    for row in rows:
        tokens = [token for token in row.tolist() if token not in hidden]
        texts.append(tokenizer.decode(tokens, skip_special_tokens=not special))
    return texts


def _groups(lengths: Tensor, apart: bool) -> list[Tensor]:
    """Return the numbers of rows that are written together; a row without tokens is in no group."""
    with_tokens = lengths.nonzero().flatten()
    if not len(with_tokens):
        return []
    if not apart:
        return [with_tokens]
    distinct_lengths = sorted({*lengths[with_tokens].tolist()})
    return [(lengths == length).nonzero().flatten() for length in distinct_lengths]


def _most_calls(calls: int, like: Tensor) -> int:
    """Return the most calls that a rank makes for its rows."""
    import torch
    from torch import distributed

    most = torch.tensor(calls, device=like.device)
    distributed.all_reduce(most, distributed.ReduceOp.MAX)
    return int(most)


def _before_end(tokens: Tensor, ends: list[int]) -> Tensor:
    """Return the tokens before the first that ends a text, and so without padding."""
    import torch

    places = torch.isin(tokens, tokens.new_tensor(ends)).nonzero()
    return tokens[: int(places[0])] if len(places) else tokens


def _can_pad_left(model: nn.Module, in_step: bool) -> bool:
    """Return True if padding before a row does not change its text; measured once on the model.

    A recurrence reads padding: what it has read stays in its state. Other models number
    positions from the padding.
    """
    caller: Any = model
    if getattr(caller, "_is_stateful", False):
        return False
    if model not in _MEASURED:
        _MEASURED[model] = _measure_padding(caller, in_step)
    return _MEASURED[model]


def _measure_padding(caller: Any, in_step: bool) -> bool:
    """Return True if a row gets the same scores alone and, with padding, next to a longer row."""
    import torch

    device = next(caller.parameters()).device
    vocabulary = int(caller.config.get_text_config().vocab_size)
    longer = (torch.arange(4 + SHIFT, device=device) * 7 + 3) % vocabulary
    row = longer[-4:].flip(0)[None]
    padded = torch.stack([torch.cat([longer.new_zeros(SHIFT), row[0]]), longer])
    mask = torch.ones_like(padded)
    mask[0, :SHIFT] = 0
    arguments = greedy_arguments(caller, {}) | {
        "max_new_tokens": 2,
        "num_beams": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
        "synced_gpus": in_step,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    with silence_transformers():
        alone = caller.generate(row, attention_mask=torch.ones_like(row), **arguments)
        with_longer = caller.generate(padded, attention_mask=mask, **arguments)
    expected = torch.stack([scores[0].float() for scores in alone.logits])
    behind_padding = torch.stack([scores[0].float() for scores in with_longer.logits])
    dtype = str(alone.logits[0].dtype).removeprefix("torch.")
    allowed = ROUNDING.get(dtype, HALF_ROUNDING) * expected.std()
    difference = (expected - behind_padding).abs().max()
    return bool(difference <= allowed)
