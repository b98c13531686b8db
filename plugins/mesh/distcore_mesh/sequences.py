"""Context parallelism: each rank computes the blocks of a decoder for a part of every sequence (Ulysses).

Between the first block and the last a rank has its own tokens. Attention needs all of them: there ranks exchange tokens
for heads, and each computes some heads over the whole sequence. Embeddings, the last norm and the head are computed for
whole sequences on every rank. A sequence that does not divide is padded inside the blocks, outside of attention.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distcore import StrategyError, repeated_blocks
from distcore_mesh.group import Group
from distcore_mesh.plans import model_type

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gpt_neox", "gpt2")
"""Model types whose blocks are known to work on a part of a sequence; all of these are tested."""
PREFIX = "distcore_ulysses_"


@dataclass(eq=False)
class Sequences:
    """What a model's blocks need to know of the sequences that are split over a group of ranks."""

    group: Group
    """The ranks that share each sequence."""
    names: frozenset[str]
    """The parameters inside the blocks: a rank computes their gradient for its own tokens."""
    length: int = field(default=0, init=False)
    """Tokens of the sequences that the blocks are computing now, over all ranks and without padding."""

    def enter(self, hidden: Tensor) -> Tensor:
        """Return this rank's tokens of ``hidden``, shape ``(n, length, …)``, padded at the end of the sequence."""
        self.length = hidden.shape[1]
        return self.group.own_part(self._padded(hidden), 1)

    def leave(self, hidden: Tensor) -> Tensor:
        """Return the tokens of all ranks, without padding."""
        return self.group.gather(hidden, 1)[:, : self.length]

    def gather(self, tokens: Tensor) -> Tensor:
        """Return all tokens, of which each rank uses its heads or hidden units; their gradient is summed."""
        # Contiguous also behind padding: transformers' Conv1D takes a view of what it is given.
        return self.group.gather_tokens(tokens)[:, : self.length].contiguous()

    def add(self, part: Tensor) -> Tensor:
        """Return this rank's tokens of the sum of ``part``, shape ``(n, length, …)``, over the ranks."""
        return self.group.add_tokens(self._padded(part))

    def own(self, positions: Tensor) -> Tensor:
        """Return this rank's part of what is the same for every sequence, shape ``(n, length, …)``."""
        return self.group.cut(self._padded(positions), 1)

    def heads(self, tokens: Tensor) -> Tensor:
        """From own tokens of all heads, ``(n, heads, tokens, size)``, to all tokens of own heads."""
        return self.group.exchange(tokens, 1, 2)[:, :, : self.length]

    def tokens(self, heads: Tensor) -> Tensor:
        """From all tokens of own heads, ``(n, tokens, heads, size)``, to own tokens of all heads."""
        return self.group.exchange(self._padded(heads), 1, 2)

    @torch.no_grad()
    def sum_gradients(self, gradients: dict[str, Tensor]) -> None:
        """Sum the gradients of the blocks' parameters over the ranks, in place; all in one collective."""
        inside = [gradient for name, gradient in gradients.items() if name in self.names]
        if inside:
            flat = self.group.sum(torch.cat([gradient.reshape(-1) for gradient in inside]))
            for gradient, total in zip(inside, flat.split_with_sizes([g.numel() for g in inside]), strict=True):
                gradient.copy_(total.view_as(gradient))

    def _padded(self, tensor: Tensor) -> Tensor:
        missing = -tensor.shape[1] % self.group.size
        return F.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, missing)) if missing else tensor


def split_sequences(model: nn.Module, group: Group, tp: int) -> Sequences:
    """Have the blocks of ``model`` compute a part of each sequence; ``tp`` ranks share each layer already.

    Raises StrategyError, one line, for a model that is not known to work so, or heads that do not divide.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    check_sequences(model, group.size, tp)
    blocks = list(repeated_blocks(model).values())
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    names = frozenset(name for name, parameter in model.named_parameters() if id(parameter) in inside)
    sequences = Sequences(group, names)
    for attention in _attentions(blocks):
        original = _implementation(attention)
        ALL_ATTENTION_FUNCTIONS.register(PREFIX + original, _attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register(PREFIX + original, ALL_MASK_ATTENTION_FUNCTIONS[original])
        # On the module: it is all that transformers' registry hands to ``_attend``.
        attention.distcore_ulysses = (sequences, ALL_ATTENTION_FUNCTIONS[original])
    for attention in _attentions(blocks):  # after all are read: they share one config
        config: Any = attention.config
        config._attn_implementation = PREFIX + _implementation(attention)
    for number, block in enumerate(blocks):
        _split_block(block, sequences, first=number == 0, last=number == len(blocks) - 1)
    return sequences


def check_sequences(model: nn.Module, cp: int, tp: int) -> None:
    """Raise StrategyError, one line, unless ``cp`` ranks can share the sequences of ``model``, also a skeleton."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    kind = model_type(model)
    if kind not in MODEL_TYPES:
        what = f"{type(model).__name__}{f' (model type {kind!r})' if kind else ''}"
        raise StrategyError(
            f"strategy_options.cp = {cp}: {what} is not known to compute parts of sequences (these are: "
            f"{', '.join(MODEL_TYPES)})"
        )
    for attention in _attentions(list(repeated_blocks(model).values())):
        _check_heads(attention.config, cp, tp)
        if (original := _implementation(attention)) not in ALL_ATTENTION_FUNCTIONS:
            raise StrategyError(f"strategy_options.cp = {cp}: does not go with {original!r} attention; use sdpa")


def _attentions(blocks: list[nn.Module]) -> list[Any]:
    modules = (module for block in blocks for module in block.modules())
    return [module for module in modules if hasattr(module, "is_causal") and hasattr(module, "config")]


def _implementation(attention: Any) -> str:
    """The name of the attention that the model would use in one process."""
    name: str = attention.config._attn_implementation
    return name.removeprefix(PREFIX)


def _check_heads(config: Any, cp: int, tp: int) -> None:
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, key, None)
        if isinstance(heads, int) and heads % (tp * cp):
            possible = ", ".join(str(size) for size in range(1, heads + 1) if heads % (tp * size) == 0)
            among = f" over tp = {tp}" if tp > 1 else ""
            raise StrategyError(
                f"strategy_options.cp = {cp}: must divide {key} = {heads}{among} (possible: {possible})"
            )


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention of transformers' registry, for this rank's tokens: shape ``(n, heads, tokens, size)`` each."""
    sequences, attention = module.distcore_ulysses
    if key.shape[2] != query.shape[2]:
        raise StrategyError("strategy 'mesh': with cp greater than 1 a model cannot generate; use cp = 1")
    output, _ = attention(module, *(sequences.heads(states) for states in (query, key, value)), mask, **options)
    return sequences.tokens(output), None


def _split_block(block: nn.Module, sequences: Sequences, first: bool, last: bool) -> None:
    def entering(_module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        hidden = inputs[0] if inputs else named["hidden_states"]
        hidden = sequences.enter(hidden) if first else hidden
        if isinstance(positions := named.get("position_embeddings"), tuple):
            named = named | {"position_embeddings": tuple(sequences.own(each) for each in positions)}
        return ((hidden, *inputs[1:]), named) if inputs else ((), named | {"hidden_states": hidden})

    block.register_forward_pre_hook(entering, with_kwargs=True)
    if last:
        leave_behind(block, sequences)


def leave_behind(block: nn.Module, sequences: Sequences) -> None:
    """Have the last block return the hidden state of all tokens."""

    def leaving(_module: nn.Module, _inputs: object, output: Any) -> Any:
        if isinstance(output, tuple):
            return (sequences.leave(output[0]), *output[1:])
        return sequences.leave(output)

    block.register_forward_hook(leaving)
