"""The weights of ``pytorch_model.bin`` as safetensors files in the cache, to read slices of."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path

from distcore import MetaModelError

INDEX = "model.safetensors.index.json"
log = logging.getLogger("distcore")


def safetensors_folder(folder: Path) -> Path:
    """Return a folder of the cache with the weights of ``folder`` in safetensors files.

    ``folder`` has them as ``pytorch_model*.bin``. The first process of a machine writes the others,
    from mapped files, while the rest wait. Nothing in the files is executed. Raises MetaModelError,
    one line, where that cannot be done.
    """
    from filelock import FileLock

    from distcore_data import cache_root  # with numpy, which reading options does not need

    sources = sorted(folder.glob("pytorch_model*.bin"))
    converted = cache_root().absolute() / "weights" / _cache_key(sources)
    try:
        converted.mkdir(parents=True, exist_ok=True)
        with FileLock(converted / "lock"):
            if not (converted / INDEX).is_file():
                log.info(
                    "%s has no safetensors files: they are made in %s, once", folder, converted
                )
                _convert(sources, converted)
    except Exception as error:
        # torch raises errors of many classes for a file that has more than tensors, or is too old
        # to be mapped.
        error_text = f"{type(error).__name__}: {error}"
        reason_in_one_line = " ".join(error_text.split())
        reason = reason_in_one_line[:150]
        raise MetaModelError(
            f"{folder} has no safetensors files, and none could be made: {reason}"
        ) from error
    return converted


def _cache_key(files: list[Path]) -> str:
    """Return a name that changes with the path, the size or the time of any of ``files``."""
    states = []
    for file in files:
        status = file.stat()
        states.append((str(file.resolve()), status.st_size, status.st_mtime_ns))
    digest = hashlib.sha256(json.dumps(states).encode()).hexdigest()
    return digest[:32]


def _convert(sources: list[Path], folder: Path) -> None:
    """Write one safetensors file into ``folder`` for each source, and then the index of all."""
    import torch
    from safetensors.torch import save_file

    file_of_tensor: dict[str, str] = {}
    for source in sources:
        tensors = torch.load(source, map_location="cpu", mmap=True, weights_only=True)
        # A tied weight is saved once, because safetensors refuses two tensors in one memory. Of its
        # names the first is written last, and stays: the model knows them all.
        tensor_in_memory: dict[tuple[object, ...], tuple[str, torch.Tensor]] = {}
        for name, tensor in reversed(tensors.items()):
            memory = (tensor.data_ptr(), tensor.shape, tensor.stride())
            tensor_in_memory[memory] = (name, tensor)
        tensors_to_save = {name: tensor.contiguous() for name, tensor in tensor_in_memory.values()}
        target = folder / f"{source.stem}.safetensors"
        save_file(tensors_to_save, target, metadata={"format": "pt"})
        file_of_tensor |= dict.fromkeys(tensors_to_save, target.name)
    index = {"metadata": {}, "weight_map": file_of_tensor}
    draft = folder / f"{INDEX}.draft"
    draft.write_text(json.dumps(index), encoding="utf-8")
    draft.replace(folder / INDEX)  # last, so that an index means that all is there
