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

    beta = options.beta
    if options.loss == "ipo":
        chosen_tokens, rejected_tokens = tokens.clamp(min=1).chunk(2)
        margin_per_token = chosen / chosen_tokens - rejected / rejected_tokens
        return (margin_per_token - 1 / (2 * beta)).square()
    margin = chosen - rejected
    if options.loss == "hinge":
        return relu(1 - beta * margin)
    smoothing = options.label_smoothing
    right_way_round = -(1 - smoothing) * logsigmoid(beta * margin)
    wrong_way_round = smoothing * logsigmoid(-beta * margin)
    return right_way_round - wrong_way_round


def kto_losses(beta: float, chosen: Tensor, rejected: Tensor, divergence: Tensor) -> Tensor:
    """Return the loss of each row, the mean over its two answers.

    ``divergence`` is that of the model from its reference, without dimensions.
    """
    desirable = 1 - (beta * (chosen - divergence)).sigmoid()
    undesirable = 1 - (beta * (divergence - rejected)).sigmoid()
    return (desirable + undesirable) / 2
