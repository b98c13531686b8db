"""State that no checkpoint has: attributes of modules, tasks and datasets, and buffers
that are not persistent.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

MAX_ELEMENTS = 1000
"""Most elements of a container that is looked into; larger ones are data rather than state."""
INNER = frozenset(vars(nn.Module()))
"""Attributes that each module has: its parts, which are looked at by themselves, and its hooks."""

State = dict[str, object]
"""By name a value that is equal where the state is equal."""


def kept_aside(module: nn.Module, **others: object) -> State:
    """Return the state in attributes and buffers of ``module`` that no checkpoint has, and
    in attributes of ``others``.

    ``others`` are objects such as the task, by the word that names them. Values of other types than
    numbers, texts, tensors, arrays, generators and containers of them are left out.
    """
    state: State = {}
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        for name in part._non_persistent_buffers_set:
            buffer = part._buffers.get(name)
            if buffer is not None:
                state[f"buffer {prefix + name!r}"] = _comparable(buffer)
        attributes = {name: value for name, value in vars(part).items() if name not in INNER}
        for name, value in _plain(attributes):
            state[f"attribute {prefix + name!r}"] = value
    for word, other in others.items():
        for name, value in _plain(getattr(other, "__dict__", {})):
            state[f"attribute {name!r} of the {word}"] = value
    return state


def lost_names(kept: State, resumed: State) -> list[str]:
    """Return the names of what ``resumed`` lacks or has otherwise, sorted."""
    lost = []
    for name, value in kept.items():
        if name not in resumed or resumed[name] != value:
            lost.append(name)
    return sorted(lost)


def _plain(attributes: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield name and comparable value of each attribute whose type is looked into."""
    for name, value in attributes.items():
        comparable = _comparable(value)
        if comparable is not None:
            yield name, comparable


def _comparable(value: Any) -> object:
    """Return what is equal for equal values; ``None`` for a value of a type
    that is not looked into.
    """
    if isinstance(value, bool | int | float | str | bytes):
        return repr(value)
    if isinstance(value, Tensor):
        # numpy has no bfloat16 or float8, but it has their bytes.
        elements = value.detach().cpu().resolve_conj().contiguous()
        raw = elements.reshape(-1).view(torch.uint8)
        return str(value.dtype), tuple(value.shape), raw.numpy().tobytes()
    if isinstance(value, np.ndarray | np.generic):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, random.Random):
        return repr(value.getstate())
    if isinstance(value, Mapping) and len(value) <= MAX_ELEMENTS:
        pairs = ((repr(key), _comparable(item)) for key, item in value.items())
        return tuple(pairs)
    if isinstance(value, list | tuple | deque) and len(value) <= MAX_ELEMENTS:
        return tuple(_comparable(item) for item in value)
    if isinstance(value, set | frozenset) and len(value) <= MAX_ELEMENTS:
        # The order of a set differs between processes.
        texts = sorted(repr(_comparable(item)) for item in value)
        return tuple(texts)
    return None
