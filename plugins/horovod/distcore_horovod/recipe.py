"""The recipe to build Horovod for today's torch: release, environment, and patches."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import astuple, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import psutil

from distcore.launchers.processes import available_cores

RELEASE = "horovod==0.28.1"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
"""Hash of the release's source archive; pip refuses any other file."""

TOOLCHAIN = """\
# torch's headers need C++20, Horovod pins C++14: raise it where they are seen, once all folders are read. Its copy of
# gloo must follow, or the two do not link.
if(PROJECT_NAME STREQUAL "horovod")
  cmake_language(DEFER CALL set_property TARGET gloo pytorch PROPERTY CXX_STANDARD 20)
endif()
"""  # noqa: E501
OLDEST_CMAKE = (3, 19)
"""The first version with ``cmake_language(DEFER)``."""


@dataclass(frozen=True, slots=True)
class Patch:
    """One replacement in a source file."""

    file: str
    """Path below the folder of the sources."""
    before: str
    """Text that must occur exactly once."""
    after: str
    """Text that replaces it."""

    def apply(self, source: Path) -> None:
        """Make the replacement in the sources below ``source``; raises ValueError if the file
        is not as expected.
        """
        path = source / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.before) != 1:
            raise ValueError(f"{self.file}: expected {self.before!r} once")
        path.write_text(text.replace(self.before, self.after), encoding="utf-8")


PATCHES = (
    # Horovod writes the ranks into reserved memory of a vector that stays empty. The stall check
    # then sees no ranks, and a collective that one rank does not join hangs forever.
    Patch(
        "horovod/common/gloo/gloo_controller.cc",
        "global_ranks_.reserve(size_)",
        "global_ranks_.resize(size_)",
    ),
    # The connections of a process set, through which everything is sent, ignore HOROVOD_GLOO_IFACE:
    # they take the address of the machine's own name, which on a fresh Debian is 127.0.1.1.
    Patch(
        "horovod/common/gloo/gloo_context.cc",
        "gloo_iface_;\n  device_attr.ai_family = AF_UNSPEC;\n  auto dev ="
        " CreateDevice(device_attr);\n\n  global_ctx =",
        "global_context.gloo_iface_;\n  device_attr.ai_family = AF_UNSPEC;\n  auto dev ="
        " CreateDevice(device_attr);\n\n  global_ctx =",
    ),
)


@dataclass(frozen=True, slots=True)
class Features:
    """Optional features of a build, besides PyTorch and gloo."""

    mpi: bool
    """True if this machine has MPI's C++ compiler and headers."""
    nccl: bool
    """True if this machine has NCCL, nvcc and a CUDA build of torch."""


def find_features() -> Features:
    """Look for MPI's compiler and headers, and for NCCL if torch is a CUDA build."""
    folders = (os.environ.get("HOROVOD_NCCL_HOME", "/usr"), "/usr/local", "/usr/local/cuda")
    nccl = (
        any(Path(folder, "include", "nccl.h").exists() for folder in folders)
        and shutil.which("nvcc") is not None
    )
    return Features(
        mpi=shutil.which("mpicxx") is not None and has_mpi_headers(), nccl=nccl and torch_has_cuda()
    )


def has_mpi_headers() -> bool:
    """Return True if ``mpicxx`` finds mpi.h.

    Distributions package compiler and headers separately.
    """
    command = ("mpicxx", "-E", "-x", "c++", "-")
    return (
        subprocess.run(
            command, input="#include <mpi.h>\n", capture_output=True, text=True
        ).returncode
        == 0
    )


def torch_has_cuda() -> bool:
    """Return True for a CUDA build of torch, without importing torch, which takes a second."""
    spec = find_spec("torch")
    return bool(
        spec
        and spec.origin
        and Path(spec.origin).with_name("lib").joinpath("libtorch_cuda.so").exists()
    )


def environment(toolchain: Path) -> dict[str, str]:
    """Return the caller's environment with the variables of the build.

    Replaces MAKEFLAGS, because that of a surrounding make would refer to an unreachable job server.
    """
    have = find_features()
    settings = {
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITH_MPI" if have.mpi else "HOROVOD_WITHOUT_MPI": "1",
        "CMAKE_TOOLCHAIN_FILE": str(toolchain),
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
        "CXXFLAGS": "-include cstdint -include string",
        "LDFLAGS": "-Wl,-s",
        "MAKEFLAGS": f"-j{jobs()}",
    }
    if have.nccl:
        settings["HOROVOD_GPU_OPERATIONS"] = "NCCL"
    return os.environ | settings


def jobs() -> int:
    """Return the number of parallel compilers: one per core, with at least 2 GiB of memory each."""
    return max(1, min(available_cores(), psutil.virtual_memory().available >> 31))


def key(built_in: Features | None = None) -> str:
    """Return the name of a build, from all inputs: torch, Python, system, features and recipe.

    ``built_in``: the features; default: those of this machine.
    """
    have = built_in or find_features()
    recipe = repr(
        (RELEASE, SHA256, TOOLCHAIN, [astuple(patch) for patch in PATCHES], astuple(have))
    )
    flags = os.environ.get("HOROVOD_BUILD_ARCH_FLAGS", "")
    digest = hashlib.sha256(f"{recipe}{flags}".encode()).hexdigest()[:12]
    python = sys.implementation.cache_tag
    system = platform.system().lower()
    return f"torch-{version('torch')}-{python}-{system}-{platform.machine()}-{digest}"


def all_keys() -> set[str]:
    """Return the names of the builds of this recipe for this torch, with any features."""
    keys = set()
    for mpi in (False, True):
        for nccl in (False, True):
            keys.add(key(Features(mpi=mpi, nccl=nccl)))
    return keys
