"""Random numbers of a model: what draws some, and cheaper dropout on a CPU.

There one number serves four values.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode

from distcore.config import RunConfig
from distcore.rounding import ceil_div

BITS = 16
"""Random bits for each value: the probability is rounded to a multiple of 2**-16."""
PROBABILITIES = ("dropout_p", "p", "dropout")
"""Arguments of operations that draw nothing if they are 0, such as attention without dropout."""

LIBRARIES = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[1]}/")
"""Folders of torch and of the core: the code of a task or of a model is elsewhere."""
BY_ROW = str(Path(__file__).with_name("row_dropout.py"))
"""The module that draws for dropout by row."""


class DrawnDropout(nn.Dropout):
    """Dropout that draws fewer numbers from torch's CPU generator; the seed decides the mask."""

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input`` with some values set to 0 and the others scaled: the mean stays."""
        is_plain = (
            type(input) is Tensor and input.device.type == "cpu" and input.is_floating_point()
        )
        # The probability, as a number of the 2**16 values that 16 bits can have.
        dropped = round(self.p * 2**BITS)
        drops_some = self.training and input.numel() and 0 < dropped < 2**BITS
        if not is_plain or not drops_some or self.inplace:
            return super().forward(input)
        count = input.numel()
        words = torch.empty(ceil_div(count, 4), dtype=torch.int64)
        words.random_(-(2**63), None)  # all 64 bits: four values of 16
        values = words.view(torch.int16)[:count].view(input.shape)
        # Signed: a value is uniform from -2**15 to 2**15 - 1.
        first_kept = dropped - 2 ** (BITS - 1)
        # Into the input's dtype at once: a mask of truth values would need a copy.
        mask = torch.empty(input.shape, dtype=input.dtype)
        torch.ge(values, first_kept, out=mask)
        return input * mask.mul_(2**BITS / (2**BITS - dropped))


def has_dropout(module: nn.Module) -> bool:
    """Return True if a layer of a model sets values to 0 in training."""
    return any(isinstance(part, _DropoutNd) and part.p for part in module.modules())


def draw_cheaply(config: RunConfig, module: nn.Module) -> None:
    """Replace a model's dropout on a CPU by ``DrawnDropout``.

    Not in compiled code, where torch's is faster.
    """
    if config.device == "cpu" and config.compile == "off":
        for part in module.modules():
            if type(part) is nn.Dropout:
                part.__class__ = DrawnDropout


class CountsDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations inside the ``with`` block that draw random numbers."""

    count = 0
    place = ""
    """Where the first of them is called, ``FILE:LINE``, in code of neither torch nor the core."""

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operation."""
        keywords = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in function.tags:
            arguments = {item.name: item.default_value for item in function._schema.arguments}
            arguments |= dict(zip(arguments, args, strict=False)) | keywords
            probabilities = [arguments[name] for name in PROBABILITIES if name in arguments]
            draws = bool(probabilities[0]) if probabilities else True
            self.count += draws
            if draws and not self.place:
                self.place = _calling_place()
        return function(*args, **keywords)


def _calling_place() -> str:
    """Return ``FILE:LINE`` of the innermost call outside of torch and the core.

    Empty if dropout by row draws.
    """
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file == BY_ROW:
            return ""
        if not file.startswith(LIBRARIES):
            return f"{_short(file)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]  # None at the end
    return ""


def _short(file: str) -> str:
    """Return a path as users read it: below the process's folder, or that of installed packages."""
    path = Path(file)
    folders_of_packages = [Path(entry) for entry in sys.path if entry]
    for folder in (Path.cwd(), *folders_of_packages):
        if path.is_relative_to(folder):
            return str(path.relative_to(folder))
    return file
