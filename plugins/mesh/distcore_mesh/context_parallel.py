"""Context parallelism: each rank computes the blocks of a decoder for a part
of every sequence (Ulysses).

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
    """Number of this rank among those that share layers beside the sequences, and
    how many they are.
    """
    length: int = field(default=0, init=False)
    """Length of the sequences of the running forward pass, over all ranks and without padding."""

    def enter(self, hidden: Tensor) -> Tensor:
        """Return this rank's tokens of ``hidden``, shape ``(n, length, …)``, which is
        padded at the end.
        """
        self.length = hidden.shape[1]
        split_tokens(self._part)
        return self.group.own_part(self._pad(hidden), 1)

    def leave(self, hidden: Tensor) -> Tensor:
        """Return the tokens of all ranks, without padding."""
        split_tokens(WHOLE)
        return self.group.gather(hidden, 1)[:, : self.length]

    def gather(self, tokens: Tensor) -> Tensor:
        """Return all tokens as the input of a split part. Their gradient is
        summed over the ranks.
        """
        split_tokens(WHOLE)
        split_features(self._part)
        # Contiguous even if padding was cut off, because transformers' Conv1D takes a view
        # of its input.
        return self.group.gather_tokens(tokens)[:, : self.length].contiguous()

    def add(self, part: Tensor) -> Tensor:
        """Return this rank's tokens of the sum of ``part``, shape ``(n, length,
        …)``, over the ranks.
        """
        split_tokens(self._part)
        split_features(WHOLE)
        return self.group.add_tokens(self._pad(part))

    def own_part(self, positions: Tensor) -> Tensor:
        """Return this rank's part of ``positions``, shape ``(n, length,
        …)``, without a gradient.
        """
        return self.group.chunk(self._pad(positions), 1)

    def tokens_to_heads(self, tokens: Tensor) -> Tensor:
        """Exchange own tokens of all heads, ``(n, heads, tokens, size)``, for all
        tokens of own heads.
        """
        rank, ranks = self.layers
        split_heads((rank * self.group.size + self.group.rank, ranks * self.group.size))
        return self.group.exchange(tokens, 1, 2)[:, :, : self.length]

    def heads_to_tokens(self, heads: Tensor) -> Tensor:
        """Exchange all tokens of own heads, ``(n, tokens, heads, size)``, for own
        tokens of all heads.
        """
        split_heads(self.layers)
        return self.group.exchange(self._pad(heads), 1, 2)

    @property
    def _part(self) -> tuple[int, int]:
        return self.group.rank, self.group.size

    @torch.no_grad()
    def sum_gradients(self, gradients: dict[str, Tensor]) -> None:
        """Sum the gradients of the blocks' parameters over the ranks, in place
        and in one collective.
        """
        inside = [gradient for name, gradient in gradients.items() if name in self.names]
        if inside:
            flat = self.group.all_reduce(torch.cat([gradient.reshape(-1) for gradient in inside]))
            for gradient, total in zip(
                inside, flat.split_with_sizes([g.numel() for g in inside]), strict=True
            ):
                gradient.copy_(total.view_as(gradient))

    def _pad(self, tensor: Tensor) -> Tensor:
        missing = -tensor.shape[1] % self.group.size
        return F.pad(tensor, (0, 0) * (tensor.dim() - 2) + (0, missing)) if missing else tensor


def split_sequences(
    model: nn.Module, group: ParallelGroup, layers: tuple[int, int]
) -> SplitSequences:
    """Have the blocks of ``model`` compute a part of each sequence.
    ``layers``: as in ``SplitSequences``.

    Raises StrategyError, one line, for a model type that is not known to work, or heads
    that do not divide.
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
        ALL_ATTENTION_FUNCTIONS.register(PREFIX + original, _attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register(
            PREFIX + original, ALL_MASK_ATTENTION_FUNCTIONS[original]
        )
        # Stored on the module, because transformers' registry hands nothing else to ``_attend``.
        attention.distcore_ulysses = (sequences, ALL_ATTENTION_FUNCTIONS[original])
    for attention in _attentions(blocks):  # in a second loop, because all of them share one config
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
        if (original := _implementation(attention)) not in ALL_ATTENTION_FUNCTIONS:
            raise StrategyError(
                f"strategy_options.cp = {cp}: does not go with {original!r} attention; use sdpa"
            )


def _attentions(blocks: list[nn.Module]) -> list[Any]:
    modules = (module for block in blocks for module in block.modules())
    return [
        module for module in modules if hasattr(module, "is_causal") and hasattr(module, "config")
    ]


def _implementation(attention: Any) -> str:
    """Return the name of the attention that the model uses in one process."""
    name: str = attention.config._attn_implementation
    return name.removeprefix(PREFIX)


def _check_heads(config: Any, cp: int, tp: int) -> None:
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, key, None)
        if isinstance(heads, int) and heads % (tp * cp):
            possible = ", ".join(
                str(size) for size in range(1, heads + 1) if heads % (tp * size) == 0
            )
            among = f" over tp = {tp}" if tp > 1 else ""
            raise StrategyError(
                f"strategy_options.cp = {cp}: must divide {key} = {heads}{among} (possible:"
                f" {possible})"
            )


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Compute attention for this rank's tokens, shape ``(n, heads, tokens,
    size)``; called by transformers.
    """
    sequences, attention = module.distcore_ulysses
    if key.shape[2] != query.shape[2]:
        raise StrategyError(
            "strategy 'mesh': with cp greater than 1 a model cannot generate; use cp = 1"
        )
    output, _ = attention(
        module,
        *(sequences.tokens_to_heads(states) for states in (query, key, value)),
        mask,
        **options,
    )
    return sequences.heads_to_tokens(output), None


def _split_block(block: nn.Module, sequences: SplitSequences, first: bool, last: bool) -> None:
    def entering(
        _module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        hidden = inputs[0] if inputs else named["hidden_states"]
        hidden = sequences.enter(hidden) if first else hidden
        if isinstance(positions := named.get("position_embeddings"), tuple):
            named = named | {
                "position_embeddings": tuple(sequences.own_part(each) for each in positions)
            }
        return ((hidden, *inputs[1:]), named) if inputs else ((), named | {"hidden_states": hidden})

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
