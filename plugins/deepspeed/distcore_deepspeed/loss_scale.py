"""DeepSpeed's dynamic loss scale in the form that checkpoints of every strategy have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distcore_deepspeed.library import DynamicLossScaler

GOOD_STEPS = "good_steps"
HYSTERESIS = "hysteresis"


@dataclass(frozen=True, slots=True)
class DynamicScale:
    """The state of DeepSpeed's scaler under the keys of ``torch.amp.GradScaler``,
    and two more keys.
    """

    scaler: DynamicLossScaler
    """The scaler of the engine's optimizer. It is read and set in place."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state.

        DeepSpeed's scale doubles one step later than torch's, so both counts are saved.
        """
        scaler = self.scaler
        good = scaler.cur_iter - 1 - scaler.last_overflow_iter
        return {
            "scale": float(scaler.cur_scale),
            "growth_factor": float(scaler.scale_factor),
            "backoff_factor": 1 / scaler.scale_factor,
            "growth_interval": int(scaler.scale_window),
            "_growth_tracker": max(0, good - 1) % scaler.scale_window,
            GOOD_STEPS: good,
            HYSTERESIS: scaler.cur_hysteresis,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the scale and its counts.

        Window, factor, hysteresis and minimum stay those of this run's config.
        """
        scaler = self.scaler
        scaler.cur_scale = max(state["scale"], scaler.min_scale)
        scaler.cur_iter = state.get(GOOD_STEPS, state["_growth_tracker"] + 1)
        scaler.last_overflow_iter = -1
        scaler.cur_hysteresis = min(
            state.get(HYSTERESIS, scaler.delayed_shift), scaler.delayed_shift
        )


def dynamic_scale(optimizer: object) -> DynamicScale | None:
    """Return the dynamic loss scale of the engine's optimizer; ``None`` if it has none."""
    scaler = getattr(optimizer, "loss_scaler", None)
    return DynamicScale(scaler) if isinstance(scaler, DynamicLossScaler) else None
