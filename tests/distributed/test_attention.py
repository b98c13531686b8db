"""Which attention of torch a training may take, by the lengths of its rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from distcore.distributed.arithmetic import attention_of

CUDNN = torch.backends.cuda.cudnn_sdp_enabled


@pytest.mark.parametrize(
    ("device", "lengths", "may"),
    [
        ("cuda", [8] * 199 + [7], True),  # the last block of a stream of documents is shorter
        ("cuda", [8] * 98 + [7] * 2, False),
        ("cuda", [], False),
        ("cpu", [8, 7], True),
    ],
)
def test_cudnn_plans_for_no_shape_that_comes_once(device: str, lengths: list[int], may: bool) -> None:
    before = CUDNN()
    with attention_of(torch.device(device), np.array(lengths)):
        assert CUDNN() == (before and may)
    assert CUDNN() == before
