"""Context parallelism (Ulysses): each rank computes a decoder's blocks for parts of sequences.

From the first block to the last, each rank has its own tokens. Attention needs all tokens: there
ranks exchange tokens for heads, and each rank computes some heads over the whole sequence. Every
rank computes embeddings, the last norm and the head for whole sequences. A sequence that does not
divide is padded inside the blocks, but not in attention.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distcore import StrategyError
from distcore.model import repeated_blocks
from distcore_mesh.mask_parts import WHOLE, split_features, split_heads, split_tokens
from distcore_mesh.parallel_group import ParallelGroup
from distcore_mesh.tp_plans import model_type

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gpt_neox", "gpt2")
"""Model types whose blocks are known to work on a part of a sequence. All of them are tested."""
PREFIX = "distcore_ulysses_"


@dataclass(eq=False)
class SplitSequences:
    """The sequences that a group of ranks shares in the blocks of a model."""

    group: ParallelGroup
    """The ranks that share each sequence."""
    names: frozenset[str]
    """Parameters inside the blocks. A rank computes their gradients for its own tokens only."""
    layers: tuple[int, int] = WHOLE
    """Number of this rank among the ranks that also share layers, and their number."""
    length: int = field(default=0, init=False)
    """Length of the sequences of the running forward pass, over all ranks and without padding."""

    def enter(self, hidden: Tensor) -> Tensor:
        """Return this rank's tokens of ``hidden``, shape ``(n, length, …)``, padded at the end."""
        self.length = hidden.shape[1]
        split_tokens(self._part)
        return self.group.own_part(self._pad(hidden), 1)

    def leave(self, hidden: Tensor) -> Tensor:
        """Return the tokens of all ranks, without padding."""
        split_tokens(WHOLE)
        return self.group.gather(hidden, 1)[:, : self.length]

    def gather(self, tokens: Tensor) -> Tensor:
        """Return all tokens as input of a split part; their gradient is summed over the ranks."""
        split_tokens(WHOLE)
        split_features(self._part)
        # Contiguous even if padding was cut off, because transformers' Conv1D takes a view
        # of its input.
        return self.group.gather_tokens(tokens)[:, : self.length].contiguous()

    def add(self, part: Tensor) -> Tensor:
        """Return this rank's tokens of the sum of ``part``, ``(n, length, …)``, over the ranks."""
        split_tokens(self._part)
        split_features(WHOLE)
        return self.group.add_tokens(self._pad(part))

    def own_part(self, positions: Tensor) -> Tensor:
        """Return this rank's part of ``positions``, ``(n, length, …)``, without a gradient."""
        return self.group.chunk(self._pad(positions), 1)

    def tokens_to_heads(self, tokens: Tensor) -> Tensor:
        """Exchange own tokens of all heads for all tokens of own heads.

        ``tokens`` has shape ``(n, heads, tokens, size)``, and so has the result.
        """
        rank, ranks = self.layers
        size = self.group.size
        # Heads are split over the ranks that share layers, then over those that share sequences.
        split_heads((rank * size + self.group.rank, ranks * size))
        return self.group.exchange(tokens, 1, 2)[:, :, : self.length]

    def heads_to_tokens(self, heads: Tensor) -> Tensor:
        """Exchange all tokens of own heads for own tokens of all heads.

        ``heads`` has shape ``(n, tokens, heads, size)``, and so has the result.
        """
        split_heads(self.layers)
        return self.group.exchange(self._pad(heads), 1, 2)

    @property
    def _part(self) -> tuple[int, int]:
        """Number of this rank in the group, and the size of the group."""
        return self.group.rank, self.group.size

    @torch.no_grad()
    def sum_gradients(self, gradients: dict[str, Tensor]) -> None:
        """Sum the gradients of the blocks' parameters over the ranks, in place.

        It takes one collective.
        """
        inside = [gradient for name, gradient in gradients.items() if name in self.names]
        if not inside:
            return
        flat = torch.cat([gradient.reshape(-1) for gradient in inside])
        sizes = [gradient.numel() for gradient in inside]
        totals = self.group.all_reduce(flat).split_with_sizes(sizes)
        for gradient, total in zip(inside, totals, strict=True):
            gradient.copy_(total.view_as(gradient))

    def _pad(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` with zeros after its tokens, so that all ranks have equal parts."""
        missing = -tensor.shape[1] % self.group.size
        if not missing:
            return tensor
        # Pairs of paddings from the last dimension on; tokens are the second one.
        of_later_dimensions = (0, 0) * (tensor.dim() - 2)
        return F.pad(tensor, (*of_later_dimensions, 0, missing))


def split_sequences(
    model: nn.Module, group: ParallelGroup, layers: tuple[int, int]
) -> SplitSequences:
    """Have the blocks of ``model`` compute a part of each sequence.

    ``layers`` is that of ``SplitSequences``. Raises StrategyError, one line, for a model type that
    is not known to work, or heads that do not divide.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    check_sequences(model, group.size, layers[1])
    blocks = list(repeated_blocks(model).values())
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    names = frozenset(
        name for name, parameter in model.named_parameters() if id(parameter) in inside
    )
    sequences = SplitSequences(group, names, layers)
    for attention in _attentions(blocks):
        original = _implementation(attention)
        mask_function = ALL_MASK_ATTENTION_FUNCTIONS[original]
        ALL_ATTENTION_FUNCTIONS.register(PREFIX + original, _attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register(PREFIX + original, mask_function)
        # Stored on the module, because transformers' registry hands nothing else to ``_attend``.
        attention.distcore_ulysses = (sequences, ALL_ATTENTION_FUNCTIONS[original])
    # In a second loop, because all of them share one config.
    for attention in _attentions(blocks):
        config: Any = attention.config
        config._attn_implementation = PREFIX + _implementation(attention)
    for number, block in enumerate(blocks):
        _split_block(block, sequences, first=number == 0, last=number == len(blocks) - 1)
    return sequences


def check_sequences(model: nn.Module, cp: int, tp: int) -> None:
    """Raise StrategyError, one line, unless ``cp`` ranks can share the sequences of ``model``.

    ``model`` may be on the meta device.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    kind = model_type(model)
    if kind not in MODEL_TYPES:
        name = f"{type(model).__name__}{f' (model type {kind!r})' if kind else ''}"
        raise StrategyError(
            f"strategy_options.cp = {cp}: {name} is not known to compute parts of sequences (these"
            f" are: {', '.join(MODEL_TYPES)})"
        )
    for attention in _attentions(list(repeated_blocks(model).values())):
        _check_heads(attention.config, cp, tp)
        original = _implementation(attention)
        if original not in ALL_ATTENTION_FUNCTIONS:
            raise StrategyError(
                f"strategy_options.cp = {cp}: does not go with {original!r} attention; use sdpa"
            )


def _attentions(blocks: list[nn.Module]) -> list[Any]:
    """Return the attention layers of the blocks, as transformers writes them."""
    attentions: list[Any] = []
    for block in blocks:
        for module in block.modules():
            if hasattr(module, "is_causal") and hasattr(module, "config"):
                attentions.append(module)
    return attentions


def _implementation(attention: Any) -> str:
    """Return the name of the attention that the model uses in one process."""
    name: str = attention.config._attn_implementation
    return name.removeprefix(PREFIX)


def _check_heads(config: Any, cp: int, tp: int) -> None:
    """Raise StrategyError unless the ranks have equal numbers of heads."""
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, key, None)
        if isinstance(heads, int) and heads % (tp * cp):
            candidates = range(1, heads + 1)
            possible = ", ".join(str(size) for size in candidates if heads % (tp * size) == 0)
            among = f" over tp = {tp}" if tp > 1 else ""
            raise StrategyError(
                f"strategy_options.cp = {cp}: must divide {key} = {heads}{among} (possible:"
                f" {possible})"
            )


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Compute attention for this rank's tokens, ``(n, heads, tokens, size)``.

    transformers calls it.
    """
    sequences, attention = module.distcore_ulysses
    if key.shape[2] != query.shape[2]:
        raise StrategyError(
            "strategy 'mesh': with cp greater than 1 a model cannot generate; use cp = 1"
        )
    query = sequences.tokens_to_heads(query)
    key = sequences.tokens_to_heads(key)
    value = sequences.tokens_to_heads(value)
    output, _ = attention(module, query, key, value, mask, **options)
    return sequences.heads_to_tokens(output), None


def _split_block(block: nn.Module, sequences: SplitSequences, first: bool, last: bool) -> None:
    """Have a block compute a part of each sequence.

    The hidden state is split before the first block and gathered after the last one; positions are
    split before each.
    """

    def entering(
        _module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        hidden = inputs[0] if inputs else named["hidden_states"]
        hidden = sequences.enter(hidden) if first else hidden
        positions = named.get("position_embeddings")
        if isinstance(positions, tuple):
            own_positions = tuple(sequences.own_part(tensor) for tensor in positions)
            named = named | {"position_embeddings": own_positions}
        if inputs:
            return (hidden, *inputs[1:]), named
        return (), named | {"hidden_states": hidden}

    block.register_forward_pre_hook(entering, with_kwargs=True)
    if last:
        gather_after(block, sequences)


def gather_after(block: nn.Module, sequences: SplitSequences) -> None:
    """Have the last block return the hidden state of all tokens."""

    def leaving(_module: nn.Module, _inputs: object, output: Any) -> Any:
        if isinstance(output, tuple):
            return (sequences.leave(output[0]), *output[1:])
        return sequences.leave(output)

    block.register_forward_hook(leaving)
