"""The declaration of a task whose model must not see the tokens that it is to predict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Causal:
    """The declaration of a causal task: an output follows from its token and earlier ones alone.

    Before the first step the core measures it: it changes the last tokens of a row, calls
    ``model(tokens, **arguments)``, and compares the output, or its ``logits``, at the tokens
    before.
    """

    tokens: str | int = "input_ids"
    """Key of the tokens in a batch, integers of shape ``(n, length)``."""
    advice: str = "give its attention a causal mask"
    """The remedy for a model that sees later tokens, for the message."""
    arguments: Mapping[str, object] = field(default_factory=dict)
    """Further keyword arguments of the call."""
    small: Callable[[], tuple[nn.Module, Tensor] | None] | None = None
    """Returns a small model of the same kind, and tokens for it, ``(1, length)``.

    It is measured before any rank starts, by ``--dry-run``, too. Returns ``None`` if there is no
    such model.
    """
