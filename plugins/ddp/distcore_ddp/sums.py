"""Communication hooks of DDP that add gradients over ranks and divide nothing,
also in half precision.

DDP by itself sends the mean. A division by a number of ranks that is no power of two rounds
every gradient once more.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

# torch's types lack it
CommHook = Callable[[Any, dist.GradBucket], Future[Tensor]]  # type: ignore[name-defined]
DTYPES = {"none": None, "fp16": torch.float16, "bf16": torch.bfloat16}
"""Map the names of ``compression`` to the dtype in which gradients are
sent; ``None``: their own.
"""


@dataclass
class Sending:
    """The state of a hook: whether gradients are sent."""

    is_on: bool = True
    """False in a backward pass whose gradients stay on their rank, although torch runs the hook."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Send nothing inside the context."""
        self.is_on = False
        try:
            yield
        finally:
            self.is_on = True


def sum_hook(compression: str = "none") -> CommHook:
    """Return a hook that adds gradients; ``compression``: ``none``, ``fp16`` or ``bf16``.

    Its state is a ``Sending`` or ``None``. torch's own ``bf16_compress_hook`` refuses gloo, so this
    hook does both dtypes.
    """
    dtype = DTYPES[compression]

    # torch checks these annotations when the hook is registered, so they must not be strings.
    def send(state: object, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        gradient: Tensor = bucket.buffer()
        if isinstance(state, Sending) and not state.is_on:
            kept: Future[Tensor] = Future()
            kept.set_result(gradient)
            return kept
        sent = gradient if dtype is None else gradient.to(dtype)
        sending: Future[Any] = dist.all_reduce(sent, async_op=True).get_future()

        def received(done: Future[Any]) -> Tensor:
            total: Tensor = done.value()[0]
            return total if dtype is None else gradient.copy_(sent)

        return sending.then(received)

    return send
