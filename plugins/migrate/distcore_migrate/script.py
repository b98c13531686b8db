"""A published script: its task, its arguments and defaults, its loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from distcore_migrate.draft import Draft, Rule, Tree


@dataclass(frozen=True, slots=True)
class LoraDefaults:
    """LoRA where its keys are not given."""

    rank: int
    """Rank of the adapters."""
    alpha: float | None
    """Their scale times the rank; ``None``: as distcore takes it."""
    dropout: float = 0.0
    """Probability of dropout before an adapter."""
    every_layer: bool = True
    """Whether every linear layer has an adapter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """One published script."""

    task: str
    """Task that the script trains."""
    rows: dict[str, Rule] = field(default_factory=dict)
    """Arguments of its own."""
    trainer: bool = True
    """Whether it trains with the Trainer; the others have a loop of their own
    with Accelerate, without clipping.
    """
    defaults: Tree = field(default_factory=dict)
    """Defaults of its arguments, and values in its source."""
    differs: tuple[str, ...] = ()
    """Acts of its source that no config can express."""
    sets: Tree = field(default_factory=dict)
    """Keys of the config that its source says."""
    own_loop: bool = False
    """Whether its loop is its own also without Accelerate."""
    strategy: str | None = None
    """The strategy that its source uses; ``None``: the launcher or a file sets it."""
    lora: LoraDefaults | None = None
    """LoRA as it takes it by default; ``None``: it has no LoRA, and trains only if told to."""
    needs_task: bool = False
    """Whether no shipped task trains this, so that ``task`` names a file of the user's."""
    data: Callable[[Draft], None] | None = None
    """Sets the data, where its library describes datasets in a file of its own."""
    evaluates_in_training: bool = False
    """Whether it reads evaluation rows only if ``eval_strategy`` says so."""
