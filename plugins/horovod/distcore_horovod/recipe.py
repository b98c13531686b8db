"""How Horovod is built against today's torch: the release, the environment, and what is mended in a private copy."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
from dataclasses import astuple, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import psutil

from distcore import available_cores

RELEASE = "horovod==0.28.1"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
"""Of the release's source archive: pip takes no other."""

TOOLCHAIN = """\
# torch's headers need C++20, Horovod pins C++14: raise it where they are seen, once all folders are read. Its copy of
# gloo must follow, or the two do not link.
if(PROJECT_NAME STREQUAL "horovod")
  cmake_language(DEFER CALL set_property TARGET gloo pytorch PROPERTY CXX_STANDARD 20)
endif()
"""
OLDEST_CMAKE = (3, 19)
"""The first that can defer a call."""


@dataclass(frozen=True, slots=True)
class Mend:
    """A word that is replaced in a source file; it must stand there exactly once."""

    file: str
    before: str
    after: str

    def apply(self, source: Path) -> None:
        """Replace it under ``source``; raises ValueError where the file is not the expected one."""
        path = source / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.before) != 1:
            raise ValueError(f"{self.file}: expected {self.before!r} once")
        path.write_text(text.replace(self.before, self.after), encoding="utf-8")


MENDS = (
    # Ranks are written into memory that was reserved but never became part of the vector, so that the stall check
    # sees no ranks, and a collective that one rank leaves out hangs for ever.
    Mend("horovod/common/gloo/gloo_controller.cc", "global_ranks_.reserve(size_)", "global_ranks_.resize(size_)"),
)


@dataclass(frozen=True, slots=True)
class Features:
    """What is built in beside PyTorch and gloo, because this machine has it."""

    mpi: bool
    nccl: bool


def features() -> Features:
    """Look for MPI's compiler, and for NCCL where torch itself is a CUDA build."""
    folders = (os.environ.get("HOROVOD_NCCL_HOME", "/usr"), "/usr/local", "/usr/local/cuda")
    nccl = any(Path(folder, "include", "nccl.h").exists() for folder in folders) and shutil.which("nvcc") is not None
    return Features(mpi=shutil.which("mpicxx") is not None, nccl=nccl and torch_has_cuda())


def torch_has_cuda() -> bool:
    """True for a CUDA build of torch; told by its files, since importing it takes a second."""
    found = find_spec("torch")
    return bool(found and found.origin and Path(found.origin).with_name("lib").joinpath("libtorch_cuda.so").exists())


def environment(toolchain: Path) -> dict[str, str]:
    """The caller's environment with what the build reads; MAKEFLAGS of a make around us would ask for its jobs."""
    have = features()
    settings = {
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI" if have.mpi else "HOROVOD_WITHOUT_MPI": "1",
        "CMAKE_TOOLCHAIN_FILE": str(toolchain),
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "CXXFLAGS": "-include cstdint",
        "LDFLAGS": "-Wl,-s",
        "MAKEFLAGS": f"-j{jobs()}",
    }
    if have.nccl:
        settings["HOROVOD_GPU_OPERATIONS"] = "NCCL"
    return os.environ | settings


def jobs() -> int:
    """Compilers at a time: one a core, each with some 2 GiB."""
    return max(1, min(available_cores(), psutil.virtual_memory().available >> 31))


def key() -> str:
    """Name a build by all that decides what comes out: torch, Python, architecture, features and this recipe."""
    recipe = repr((RELEASE, SHA256, TOOLCHAIN, [astuple(mend) for mend in MENDS], astuple(features())))
    flags = os.environ.get("HOROVOD_BUILD_ARCH_FLAGS", "")
    digest = hashlib.sha256(f"{recipe}{flags}".encode()).hexdigest()[:12]
    python = sys.implementation.cache_tag
    return f"torch-{version('torch')}-{python}-{platform.system().lower()}-{platform.machine()}-{digest}"
