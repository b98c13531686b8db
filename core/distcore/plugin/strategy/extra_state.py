"""State of modules that is neither parameter nor buffer: ``get_extra_state``, as bytes.

A checkpoint has tensors only. JSON values, tensors and containers of both become the bytes of a
JSON text; a pickle would run code when it is read.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from distcore.errors import CheckpointError, TaskError

SUFFIX = "_extra_state"
"""torch's key of the state in a module's ``state_dict``."""
_TENSOR = "__tensor__"
"""Key of an encoded tensor."""


def has_extra_state(module: nn.Module) -> bool:
    """Return True if a part of ``module`` has state that is neither parameter nor buffer."""
    return next(extra_state_names(module), None) is not None


def extra_state_names(module: nn.Module) -> Iterator[str]:
    """Yield the names of the extra states, as in ``state_dict``."""
    for name, _ in _keepers(module):
        yield name


def extra_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the extra state of all parts of ``module`` by name, as JSON text: uint8, ``(n,)``.

    Raises TaskError, one line, for what is neither JSON nor tensor.
    """
    return {name: _encoded(name, keeper.get_extra_state()) for name, keeper in _keepers(module)}


def load_extra_state(module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Give the parts of ``module`` their state of ``saved``, by name; others keep theirs.

    Raises CheckpointError for bytes that are no such state.
    """
    for name, keeper in _keepers(module):
        if name not in saved:
            continue
        try:
            state = json.loads(bytes(saved[name].tolist()), object_hook=_tensor_of)
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            raise CheckpointError(f"model/{name}: damaged: it is no extra state: {error}") from None
        keeper.set_extra_state(state)


def tensors_of_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the entries of ``module.state_dict()`` that are parameters and buffers."""
    extra = set(extra_state_names(module))
    state = module.state_dict()
    return {name: value for name, value in state.items() if name not in extra}


def _keepers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the name of each extra state, and the part of the module that has it."""
    for path, part in module.named_modules():
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            yield f"{path}.{SUFFIX}".lstrip("."), part


def _encoded(name: str, state: object) -> Tensor:
    """Return a state as the bytes of a JSON text; raises TaskError for what JSON cannot hold."""
    try:
        text = json.dumps(_plain(state), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TaskError(
            f"task: the model's {name} cannot be saved: {error}; get_extra_state() may return JSON"
            " values, tensors, and lists and dicts of them"
        ) from None
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _plain(value: Any) -> Any:
    """Return ``value`` with each tensor as a dict.

    Raises TypeError for tuples and keys that are no text: JSON would turn them into others.
    """
    if isinstance(value, Tensor):
        whole = value.detach().cpu().contiguous()
        data = whole.reshape(-1).view(torch.uint8).numpy().tobytes()
        kind = str(whole.dtype).removeprefix("torch.")
        text = base64.b64encode(data).decode()
        return {_TENSOR: kind, "shape": list(whole.shape), "data": text}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"a dict has the key {key!r}, which is no text")
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"it holds a {type(value).__name__}")


def _tensor_of(tree: dict[str, Any]) -> Any:
    """Return the tensor that ``_plain`` made a dict of; any other dict as it is."""
    if _TENSOR not in tree:
        return tree
    dtype = getattr(torch, tree[_TENSOR])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{tree[_TENSOR]!r} is no dtype")
    data = bytearray(base64.b64decode(tree["data"]))
    flat = torch.empty(0, dtype=torch.uint8)
    # frombuffer refuses an empty buffer.
    if data:
        flat = torch.frombuffer(data, dtype=torch.uint8)
    return flat.view(dtype).view(tree["shape"])
