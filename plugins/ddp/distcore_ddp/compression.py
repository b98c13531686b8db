"""Communication hooks that send gradients in half precision."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

CommHook = Callable[[Any, dist.GradBucket], Future[Tensor]]  # type: ignore[name-defined]  # torch's types lack it
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def compression_hook(kind: str) -> CommHook:
    """Return a DDP communication hook that averages gradients in half precision.

    ``kind``: ``fp16`` or ``bf16``. torch's own ``bf16_compress_hook`` refuses gloo, so this hook does both dtypes.
    """
    dtype = DTYPES[kind]

    # torch checks these annotations when the hook is registered.
    def send(_state: object, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        gradient: Tensor = bucket.buffer()
        sent = gradient.to(dtype).div_(dist.get_world_size())
        work = dist.all_reduce(sent, async_op=True)

        def copy_back(_done: Future[Any]) -> Tensor:
            return gradient.copy_(sent)

        sending: Future[Any] = work.get_future()
        return sending.then(copy_back)

    return send
