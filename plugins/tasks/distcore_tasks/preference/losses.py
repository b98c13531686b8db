"""The losses of preference tuning, from log likelihoods of answers under a model and its reference.

=========  ==================================================================================
``dpo``    Rafailov et al. 2023; with label smoothing, Mitchell 2023
``ipo``    Azar et al. 2023, over means per token, as TRL computes it
``hinge``  Zhao et al. 2023
``kto``    Ethayarajh et al. 2024; each row is a desirable and an undesirable answer
=========  ==================================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from distcore_tasks.preference.options import PreferenceOptions

if TYPE_CHECKING:
    from torch import Tensor


def row_losses(
    options: PreferenceOptions, chosen: Tensor, rejected: Tensor, tokens: Tensor
) -> Tensor:
    """Return the loss of each row, fp32 ``(n,)``.

    ``chosen`` and ``rejected`` are log likelihood ratios of the model to its reference, ``(n,)``;
    ``tokens`` are the lengths of all answers, chosen ones first, ``(2 n,)``.
    """
    from torch.nn.functional import logsigmoid, relu

    beta, margin = options.beta, chosen - rejected
    if options.loss == "ipo":
        of_chosen, of_rejected = tokens.clamp(min=1).chunk(2)
        return (chosen / of_chosen - rejected / of_rejected - 1 / (2 * beta)).square()
    if options.loss == "hinge":
        return relu(1 - beta * margin)
    smoothing = options.label_smoothing
    return -(1 - smoothing) * logsigmoid(beta * margin) - smoothing * logsigmoid(-beta * margin)


def kto_losses(beta: float, chosen: Tensor, rejected: Tensor, divergence: Tensor) -> Tensor:
    """Return the loss of each row, the mean over its answers; ``divergence`` is the
    model's from its reference.
    """
    desirable = 1 - (beta * (chosen - divergence)).sigmoid()
    undesirable = 1 - (beta * (divergence - rejected)).sigmoid()
    return (desirable + undesirable) / 2
