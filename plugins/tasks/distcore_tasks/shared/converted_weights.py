"""The weights of ``pytorch_model.bin`` as safetensors files in the cache, of which
slices can be read.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

from distcore import MetaModelError

INDEX = "model.safetensors.index.json"
log = logging.getLogger("distcore")


def safetensors_folder(folder: Path) -> Path:
    """Return a folder with the same weights in safetensors files, in the
    cache; ``folder`` has ``pytorch_model*.bin``.

    The first process of a machine writes it, from mapped files, while others wait. Nothing in the
    files is executed. Raises MetaModelError, one line, where that cannot be done.
    """
    from filelock import FileLock

    from distcore_data import cache_root  # with numpy, which reading options does not need

    sources = sorted(folder.glob("pytorch_model*.bin"))
    states = [
        (str(file.resolve()), (state := file.stat()).st_size, state.st_mtime_ns) for file in sources
    ]
    key = hashlib.sha256(json.dumps(states).encode()).hexdigest()[:32]
    converted = cache_root().absolute() / "weights" / key
    try:
        converted.mkdir(parents=True, exist_ok=True)
        with FileLock(converted / "lock"):
            if not (converted / INDEX).is_file():
                log.info(
                    "%s has no safetensors files: they are made in %s, once", folder, converted
                )
                _convert(sources, converted)
    except Exception as error:
        # of torch, for a file that has more than tensors, or is too old to be mapped
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:150]
        raise MetaModelError(
            f"{folder} has no safetensors files, and none could be made: {reason}"
        ) from error
    return converted


def _convert(sources: list[Path], folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    places: dict[str, str] = {}
    for source in sources:
        tensors = torch.load(source, map_location="cpu", mmap=True, weights_only=True)
        # A tied weight once: the model knows all its names.
        own = {
            (tensor.data_ptr(), tensor.shape, tensor.stride()): (name, tensor)
            for name, tensor in reversed(tensors.items())
        }
        target = folder / f"{source.stem}.safetensors"
        save_file(
            {name: tensor.contiguous() for name, tensor in own.values()},
            target,
            metadata={"format": "pt"},
        )
        places |= dict.fromkeys((name for name, _ in own.values()), target.name)
    draft = folder / f"{INDEX}.draft"
    draft.write_text(json.dumps({"metadata": {}, "weight_map": places}), encoding="utf-8")
    draft.replace(folder / INDEX)  # last, so that an index means that all is there
