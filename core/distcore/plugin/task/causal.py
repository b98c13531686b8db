"""The declaration of a task whose model must not see the tokens that it is to predict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Causal:
    """The declaration of a causal task: the model's output at a token depends on that token and
    those before it alone.

    Before the first step the core measures it: it changes the last tokens of a row, calls
    ``model(tokens, **arguments)``, and compares the output, or its ``logits``, at the tokens
    before.
    """

    tokens: str | int = "input_ids"
    """Key of the tokens in a batch, integers of shape ``(n, length)``."""
    advice: str = "give its attention a causal mask"
    """What to do about a model that sees later tokens, for the message."""
    arguments: Mapping[str, object] = field(default_factory=dict)
    """Keyword arguments of the call, beside the tokens."""
    small: Callable[[], tuple[nn.Module, Tensor] | None] | None = None
    """Returns a model of the same kind, so small that it is measured before any rank starts, by
    ``--dry-run``, too, and tokens for it, ``(1, length)``; or ``None`` if there is no such model.
    """
