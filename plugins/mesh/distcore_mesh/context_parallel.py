"""Context parallelism: each rank computes a decoder's blocks for parts of sequences.

From the first block to the last, each rank has its own tokens. Attention needs all tokens. There
ranks exchange tokens for heads, and each rank computes some heads over the whole sequence
(Ulysses); or keys and values go around the ranks (a ring). Every
rank computes embeddings, the last norm and the head for whole sequences. A sequence that does not
divide is padded inside the blocks, but not in attention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distcore import StrategyError
from distcore.model import repeated_blocks
from distcore_mesh.document_attention import PackedRows, attend
from distcore_mesh.mask_parts import WHOLE, split_features, split_heads, split_tokens
from distcore_mesh.parallel_group import ParallelGroup
from distcore_mesh.tp_plans import model_type

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gpt_neox", "gpt2")
"""Model types whose blocks are known to work on a part of a sequence. All of them are tested."""
PREFIX = "distcore_ulysses_"
Exchange = Literal["auto", "heads", "blocks", "keys"]
"""How ranks that share sequences compute attention; see ``MeshOptions.cp_exchange``."""


@dataclass(eq=False)
class SplitSequences:
    """The sequences that a group of ranks shares in the blocks of a model."""

    group: ParallelGroup
    """The ranks that share each sequence."""
    names: frozenset[str]
    """Parameters inside the blocks. A rank computes their gradients for its own tokens only."""
    exchange: Exchange = "heads"
    """How attention is computed."""
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
    model: nn.Module, group: ParallelGroup, layers: tuple[int, int], exchange: Exchange = "heads"
) -> SplitSequences:
    """Have the blocks of ``model`` compute a part of each sequence.

    ``layers`` is that of ``SplitSequences``; ``exchange`` is the option. Raises StrategyError, one
    line, for a model type that is not known to work, or heads that do not divide.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    check_sequences(model, group.size, layers[1], exchange)
    blocks = list(repeated_blocks(model).values())
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    names = frozenset(
        name for name, parameter in model.named_parameters() if id(parameter) in inside
    )
    exchange = _resolve_exchange(exchange, _attentions(blocks), group.size * layers[1])
    sequences = SplitSequences(group, names, exchange, layers)
    for attention in _attentions(blocks):
        original = _implementation(attention)
        mask_function = ALL_MASK_ATTENTION_FUNCTIONS[original]
        if exchange != "heads":
            mask_function = partial(_mask_beside_documents, mask_function, exchange)
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


def _resolve_exchange(exchange: Exchange, attentions: list[Any], ranks: int) -> Exchange:
    """Return ``keys`` for ``auto`` where ``ranks`` do not divide the heads, and ``heads`` where
    attention has dropout or the model is not on a CPU, for which blocks have no kernel.
    """
    if exchange != "auto":
        return exchange
    if any(_implementation(attention) != "sdpa" for attention in attentions):
        return "heads"  # which has kernels of its own for packed rows
    if any(_odd_heads(attention.config, ranks) for attention in attentions):
        return "keys"
    is_on_cpu = all(
        parameter.device.type == "cpu"
        for attention in attentions
        for parameter in attention.parameters()
    )
    return "auto" if is_on_cpu and not any(map(_has_dropout, attentions)) else "heads"


def _has_dropout(attention: Any) -> bool:
    """Return True if an attention layer drops attention weights in training."""
    dropout = getattr(attention, "attn_dropout", None)
    rate = dropout.p if dropout is not None else getattr(attention, "attention_dropout", 0.0)
    return bool(rate)


def check_sequences(model: nn.Module, cp: int, tp: int, exchange: Exchange = "heads") -> None:
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
        if exchange in ("heads", "blocks"):
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


def _odd_heads(config: Any, ranks: int) -> dict[str, int]:
    """Return the numbers of heads that ``ranks`` do not divide, by their key in the config."""
    counts = {
        key: getattr(config, key, None) for key in ("num_attention_heads", "num_key_value_heads")
    }
    return {key: n for key, n in counts.items() if isinstance(n, int) and n % ranks}


def _check_heads(config: Any, cp: int, tp: int) -> None:
    """Raise StrategyError unless the ranks have equal numbers of heads."""
    for key, heads in _odd_heads(config, tp * cp).items():
        candidates = range(1, heads + 1)
        possible = ", ".join(str(size) for size in candidates if heads % (tp * size) == 0)
        among = f" over tp = {tp}" if tp > 1 else ""
        raise StrategyError(
            f"strategy_options.cp = {cp}: must divide {key} = {heads}{among} (possible:"
            f" {possible}); or use cp_exchange = 'keys', which divides no heads"
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
    if sequences.exchange == "keys":
        rows = _packed_rows(sequences, module, query, mask, options)
        output = attend(query, key, value, rows, _scale(query, options), sequences.group)
        return output.transpose(1, 2), None
    query = sequences.tokens_to_heads(query)
    key = sequences.tokens_to_heads(key)
    value = sequences.tokens_to_heads(value)
    if _goes_by_documents(sequences, mask, options):
        rows = _packed_rows(sequences, module, query, mask, options)
        key, value = key.contiguous(), value.contiguous()
        output = attend(query.contiguous(), key, value, rows, _scale(query, options))
        output = output.transpose(1, 2)
    else:
        output, _ = attention(module, query, key, value, mask, **options)
    return sequences.heads_to_tokens(output), None


def _goes_by_documents(
    sequences: SplitSequences, mask: Tensor | None, options: dict[str, Any]
) -> bool:
    """Return True if a rank computes its heads document by document.

    With ``auto`` rows of one document each go to the model's own attention, which takes them
    together; so do rows that need a mask.
    """
    if sequences.exchange != "auto":
        return sequences.exchange == "blocks"
    positions = options.get("position_ids")
    if mask is not None or positions is None:
        return False
    return _are_packed(positions) or options.get("sliding_window") is not None


def _packed_rows(
    sequences: SplitSequences,
    module: nn.Module,
    query: Tensor,
    mask: Tensor | None,
    options: dict[str, Any],
) -> PackedRows:
    """Return the documents of the rows; raises StrategyError for what blocks cannot compute."""
    why = None
    positions = options.get("position_ids")
    if options.get("dropout") and module.training:
        why = "has no dropout; set the model's attention_dropout to 0"
    elif mask is not None and mask.dim():
        why = "needs padding at the end of rows alone"
    elif positions is None:
        why = "needs position_ids, which this model does not hand to its attention"
    elif mask is not None and _are_packed(positions):
        why = "takes packed rows without an attention_mask, under which documents see each other"
    elif query.device.type != "cpu":
        why = f"has no kernel on {query.device.type}"
    if why is not None:
        raise StrategyError(
            f"strategy_options.cp_exchange = {sequences.exchange!r}: attention by documents {why};"
            " or use heads"
        )
    assert positions is not None
    return PackedRows.of_positions(positions.expand(len(query), -1), options.get("sliding_window"))


def _are_packed(positions: Tensor) -> bool:
    """Return True if a row has more than one document."""
    return bool((positions[:, 1:] == 0).any())


def _scale(query: Tensor, options: dict[str, Any]) -> float:
    """Return the factor of the products of queries and keys."""
    scale = options.get("scaling")
    return float(query.shape[-1] ** -0.5 if scale is None else scale)


def _mask_beside_documents(
    make_mask: Callable[..., Tensor | None],
    exchange: Exchange,
    *sizes: Any,
    attention_mask: Tensor | None = None,
    **settings: Any,
) -> Tensor | None:
    """Return no mask for rows without an attention mask, whose documents follow from positions.

    An attention mask has the model leave documents out of account. With ``auto`` it then makes the
    mask of one process. Else the result has no dimension where padding is at the end of rows alone,
    which no token sees.
    """
    if attention_mask is None:
        return None
    ends_with_padding = bool((attention_mask[:, 1:] <= attention_mask[:, :-1]).all())
    if ends_with_padding and exchange != "auto":
        return attention_mask.new_ones(())
    return make_mask(*sizes, attention_mask=attention_mask, **settings)


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
