"""Refuse sdists and wheels that must not be published: one line per problem, exit code 1.

    python tools/release_check.py dist

Each distribution must have an sdist and a wheel of one version, the version that its package
states; each archive must hold the project's LICENSE and no placeholder for an address; the
changelog must have a dated section for the version. What every index checks by itself (fields,
classifiers, the description) is left to ``twine check``.
"""

from __future__ import annotations

import argparse
import re
import sys
import tarfile
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from email import message_from_bytes
from email.message import Message
from functools import cached_property
from pathlib import Path

from packaging.utils import parse_sdist_filename, parse_wheel_filename

PLACEHOLDER = "example.invalid"
"""The host in pyproject.toml, CHANGELOG.md and SECURITY.md until the project has real addresses."""
LICENSE = Path(__file__).parents[1] / "LICENSE"
SPDX = "Apache-2.0"
TOP = "distcore"
"""The distribution without code, whose sdist holds the changelog, and the file
that states its version.
"""
IMPORTED = {"distcore-core": "distcore"}
"""The package of a distribution, where its name is not that of the distribution."""


@dataclass(frozen=True)
class Archive:
    """One built file, read into memory."""

    file: Path
    members: dict[str, bytes]
    """Content by path; for an sdist, relative to its top folder."""
    metadata_folder: str
    """Folder of the metadata: ``X.dist-info/`` in a wheel, empty in an sdist, where it
    is at the top.
    """

    @property
    def is_wheel(self) -> bool:
        """True for a wheel, False for an sdist."""
        return self.file.suffix == ".whl"

    @cached_property
    def metadata(self) -> Message:
        """The fields of METADATA or PKG-INFO."""
        return message_from_bytes(
            self.members[f"{self.metadata_folder}{'METADATA' if self.is_wheel else 'PKG-INFO'}"]
        )

    @property
    def name(self) -> str:
        """The name of the distribution."""
        return str(self.metadata["Name"])


def read(file: Path) -> Archive:
    """Read a wheel or an sdist into memory."""
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as wheel:
            members = {name: wheel.read(name) for name in wheel.namelist()}
        folder = next(
            name for name in members if name.endswith(".dist-info/METADATA")
        ).removesuffix("METADATA")
        return Archive(file, members, folder)
    with tarfile.open(file) as sdist:
        opened = {
            entry.name.partition("/")[2]: sdist.extractfile(entry)
            for entry in sdist
            if entry.isfile()
        }
        return Archive(file, {name: member.read() for name, member in opened.items() if member}, "")


def version_problems(archive: Archive) -> Iterator[str]:
    """Compare the version of the metadata with the file's name and with
    ``__version__`` of the package.
    """
    stated = str(archive.metadata["Version"])
    named = (parse_wheel_filename if archive.is_wheel else parse_sdist_filename)(archive.file.name)[
        1
    ]
    if stated != str(named):
        yield f"the metadata says version {stated}, the file name {named}"
    if archive.name == TOP and archive.is_wheel:
        return  # no code
    package = IMPORTED.get(archive.name, archive.name.replace("-", "_"))
    source = archive.members.get(f"{package}/__init__.py") or archive.members.get(
        f"core/{package}/__init__.py", b""
    )
    match = re.search(r'^__version__ = "(.+)"$', source.decode(), re.M)
    if match is None:
        yield f"no __version__ in {package}/__init__.py"
    elif match[1] != stated:
        yield f"the metadata says version {stated}, {package}.__version__ {match[1]}"


def license_problems(archive: Archive) -> Iterator[str]:
    """Check that the archive names and holds the project's LICENSE."""
    if archive.metadata["License-Expression"] != SPDX:
        yield f"License-Expression is {archive.metadata['License-Expression']}, expected {SPDX}"
    path = f"{archive.metadata_folder}licenses/LICENSE" if archive.is_wheel else "LICENSE"
    if "LICENSE" not in archive.metadata.get_all("License-File", []) or path not in archive.members:
        yield "holds no LICENSE"
    elif archive.members[path] != LICENSE.read_bytes():
        yield "its LICENSE is not the project's"


def address_problems(archive: Archive) -> Iterator[str]:
    """Check that there are project URLs, and no placeholders."""
    if not archive.metadata.get_all("Project-URL"):
        yield "no project URLs"
    for name in sorted(
        name for name, content in archive.members.items() if PLACEHOLDER.encode() in content
    ):
        yield f"{name}: {PLACEHOLDER} is a placeholder; put the real address in"


def changelog_problems(archive: Archive) -> Iterator[str]:
    """Check the changelog, in the one archive that has one: the sdist of ``distcore``."""
    changelog = archive.members.get("CHANGELOG.md", b"").decode()
    heading = rf"^## \[{re.escape(str(archive.metadata['Version']))}\] - \d{{4}}-\d\d-\d\d$"
    if changelog and not re.search(heading, changelog, re.M):
        yield f"CHANGELOG.md: no section '## [{archive.metadata['Version']}] - YYYY-MM-DD'"


def pair_problems(archives: list[Archive]) -> Iterator[str]:
    """Check that each distribution has one sdist and one wheel, of the same version."""
    by_name: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for archive in archives:
        kind = "wheel" if archive.is_wheel else "sdist"
        by_name[archive.name].append((kind, str(archive.metadata["Version"])))
    for name, files in sorted(by_name.items()):
        if (
            sorted(kind for kind, _ in files) != ["sdist", "wheel"]
            or len({version for _, version in files}) > 1
        ):
            listed = ", ".join(f"{kind} {version}" for kind, version in sorted(files))
            yield f"{name}: expected one sdist and one wheel of one version, found {listed}"


def problems(archives: list[Archive]) -> Iterator[str]:
    """Yield one line for each reason not to publish ``archives``."""
    yield from pair_problems(archives)
    for archive in archives:
        for check in (version_problems, license_problems, address_problems, changelog_problems):
            yield from (f"{archive.file.name}: {problem}" for problem in check(archive))


def main() -> int:
    """Check a folder and print the problems; return 0 if there are none."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the sdists and wheels are")
    folder = parser.parse_args().folder
    archives = [read(file) for file in sorted([*folder.glob("*.tar.gz"), *folder.glob("*.whl")])]
    if not archives:
        parser.error(f"{folder}: holds no sdist and no wheel; make dist builds them")
    listed = list(problems(archives))
    print("\n".join(listed) or f"{len(archives)} files may be published")
    return int(bool(listed))


if __name__ == "__main__":
    sys.exit(main())
