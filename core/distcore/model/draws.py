"""Operations of torch that draw random numbers, on any device and from any generator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PROBABILITIES = ("dropout_p", "p", "dropout")
"""Arguments of operations that draw nothing where they are 0, such as attention without dropout."""


class CountsDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the draws inside the ``with`` block."""

    count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operation."""
        given = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in function.tags:
            named = {it.name: it.default_value for it in function._schema.arguments}
            named |= dict(zip(named, args, strict=False)) | given
            self.count += next((bool(named[name]) for name in PROBABILITIES if name in named), True)
        return function(*args, **given)
