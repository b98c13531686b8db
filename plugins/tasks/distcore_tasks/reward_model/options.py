"""Options of reward models: those of all tasks on pairs, and of the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from distcore import OnResume
from distcore_tasks.preference.options import PairOptions


@dataclass(frozen=True, kw_only=True)
class RewardOptions(PairOptions):
    """Options of a reward model."""

    pretrained_lr: ClassVar[float] = 1e-5
    on_resume: ClassVar[dict[str, OnResume]] = PairOptions.on_resume | {"center": "ask"}

    center: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the squared sum of both rewards in the loss, which keeps rewards near 0."""
