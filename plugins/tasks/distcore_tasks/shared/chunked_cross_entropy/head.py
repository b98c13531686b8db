"""The head of a transformers model that returns losses in place of logits.

The head itself computes them, in its ``forward``: there a strategy has gathered its weight,
once for all chunks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from distcore_tasks.shared.jagged import IGNORED

if TYPE_CHECKING:
    from torch import Tensor, nn

Wanted = Literal["sum", "rows"]


class ChunkedHead:
    """Hooks and the ``forward`` of a head; an object, so that a copied model has its own."""

    def __init__(self, head: Any, smoothing: float) -> None:
        """Take over the ``forward`` of ``head``, a linear layer whose output is the model's."""
        self.head, self.smoothing = head, smoothing
        self.rows = head.weight.shape[0]
        self.wanted: Wanted | None = None
        self.labels: Tensor | None = None
        self.mask: Tensor | None = None
        head.forward = self.forward

    def enter(self, model: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Take labels out of a call with ``cross_entropy``; runs before the model's ``forward``."""
        kwargs = dict(kwargs)
        self.wanted = kwargs.pop("cross_entropy", None)
        self.labels = None
        if self.wanted:
            self.labels = kwargs.pop("labels")
            self.mask = kwargs.get("attention_mask")
            if model.config.is_encoder_decoder:
                decoder_inputs = model.prepare_decoder_input_ids_from_labels(self.labels)
                kwargs["decoder_input_ids"] = decoder_inputs
        # Not so if an adapter wraps the head.
        self.is_output = model.get_output_embeddings() is self.head
        return args, kwargs

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the logits, or the loss or scores that ``cross_entropy`` asks for."""
        weight, bias = self.head.weight, self.head.bias
        # A strategy may have split the vocabulary, whose logits are whole only outside of the head.
        if not self.wanted or not self.is_output or weight.shape[0] != self.rows:
            logits: Tensor = type(self.head).forward(self.head, hidden)
            return logits
        result = self._losses(hidden.flatten(0, -2), weight, bias)
        # Tells ``leave`` that the head has computed them.
        self.labels = None
        return result

    def _losses(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the loss, ``(1, 1, 1)``, or the scores, ``(1, positions, 3)``.

        ``hidden`` is ``(positions, size)``.
        """
        from distcore_tasks.shared.chunked_cross_entropy import function

        if self.wanted == "sum":
            compute, columns = function.summed_cross_entropy, 1
        else:
            compute, columns = function.scored, 3
        labels = self._labels_of(len(hidden))
        losses = compute(hidden, weight, bias, labels, self.smoothing, IGNORED)
        # Sharding strategies want no view as the output of a model.
        return losses.reshape(1, -1, columns).clone()

    def _labels_of(self, positions: int) -> Tensor:
        """Return the label of each position: without padding, if the layers return tokens only."""
        assert self.labels is not None
        if self.labels.numel() != positions and self.mask is not None:
            return self.labels[self.mask.bool()]
        return self.labels.flatten()

    def leave(self, model: nn.Module, args: Any, outputs: Any) -> Any:
        """Compute the loss or scores from logits if the head could not.

        This runs after ``forward`` of the model.
        """
        if self.wanted and self.labels is not None:
            outputs.logits = self._from_logits(outputs.logits.float().flatten(0, 1))
        self.wanted = self.labels = self.mask = None
        return outputs

    def _from_logits(self, logits: Tensor) -> Tensor:
        """Return what ``_losses`` does, from logits, ``(positions, vocabulary)``."""
        import torch
        from torch.nn.functional import cross_entropy

        labels = self._labels_of(len(logits))
        settings: Any = {
            "ignore_index": IGNORED,
            "reduction": "sum" if self.wanted == "sum" else "none",
        }
        loss = cross_entropy(logits, labels, label_smoothing=self.smoothing, **settings)
        if self.wanted == "sum":
            return loss.view(1, 1, 1)
        plain = cross_entropy(logits, labels, **settings)
        is_right = (logits.argmax(-1) == labels).float()
        return torch.stack((loss, plain, is_right), -1)[None]


def chunk_head(model: Any, smoothing: float = 0.0) -> None:
    """Make a transformers ``model`` return losses, not logits, for a call with ``cross_entropy``.

    ``cross_entropy="sum"`` with ``labels``, one for each position of the head, sets ``logits`` to
    the sum of the losses, ``(1, 1, 1)``; ``"rows"`` to ``(1, positions, 3)``, as ``scored`` does.
    Other calls return logits.
    """
    chunked = ChunkedHead(model.get_output_embeddings(), smoothing)
    model.register_forward_pre_hook(chunked.enter, with_kwargs=True)
    model.register_forward_hook(chunked.leave)
    model.chunked_head = chunked


def has_chunked_head(model: Any) -> bool:
    """Return True if ``model``, wrapped or not, answers calls with ``cross_entropy``."""
    from transformers import PreTrainedModel

    modules = model.modules() if hasattr(model, "modules") else ()
    whole = next((module for module in modules if isinstance(module, PreTrainedModel)), None)
    return hasattr(whole, "chunked_head")
