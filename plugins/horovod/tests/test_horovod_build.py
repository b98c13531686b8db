"""The command that builds Horovod: what it refuses, what it names, what it keeps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from distcore import StrategyError
from distcore_horovod import __main__, build, recipe


def test_a_build_is_named_by_torch_python_and_architecture() -> None:
    import platform
    from importlib.metadata import version

    assert recipe.key().startswith(f"torch-{version('torch')}-{sys.implementation.cache_tag}-")
    assert f"-{platform.machine()}-" in recipe.key()


def test_a_build_is_named_by_its_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    before = recipe.key()
    monkeypatch.setattr(recipe, "TOOLCHAIN", recipe.TOOLCHAIN + "# changed\n")
    assert recipe.key() != before


def test_a_patch_replaces_a_word_in_the_copy(tmp_path: Path) -> None:
    (tmp_path / "a.cc").write_text("v.reserve(size_);")
    recipe.Patch("a.cc", "reserve", "resize").apply(tmp_path)
    assert (tmp_path / "a.cc").read_text() == "v.resize(size_);"


def test_a_source_of_another_version_is_not_patched(tmp_path: Path) -> None:
    (tmp_path / "a.cc").write_text("v.resize(size_);")
    with pytest.raises(ValueError, match=r"^a\.cc: expected 'reserve' once"):
        recipe.Patch("a.cc", "reserve", "resize").apply(tmp_path)


def test_a_machine_without_compiler_is_told_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(
        StrategyError,
        match=r"^horovod cannot be built: no 'c\+\+' on this machine; install a C\+\+20",
    ):
        build.check_compiler()


def test_a_machine_without_cmake_and_network_is_told_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.delenv("HOROVOD_CMAKE", raising=False)
    with pytest.raises(
        StrategyError, match=r"no cmake of version 3\.19 or later here, and pip could not install"
    ):
        build.provide_cmake(tmp_path)


def test_an_old_cmake_is_not_taken(tmp_path: Path) -> None:
    old = tmp_path / "cmake"
    old.write_text("#!/bin/sh\necho cmake version 3.13.4\n")
    old.chmod(0o755)
    assert build.cmake_version(str(old)) == (3, 13)
    assert build.cmake_version(str(old)) < recipe.OLDEST_CMAKE


def test_a_release_that_cannot_be_had_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(StrategyError, match=r"^horovod==0\.28\.1 cannot be downloaded: ERROR: .+"):
        build.download(tmp_path)


def test_a_failed_compilation_names_the_first_error_and_the_log(
    capfd: pytest.CaptureFixture[str],
) -> None:
    says = (
        "print('[ 40%] Building'); print('a.cc:1: error: no x'); print('make: stopped'); raise"
        " SystemExit(2)"
    )
    with pytest.raises(
        StrategyError, match=r"did not compile: a\.cc:1: error: no x; full log: .+$"
    ) as caught:
        build.compile_wheel([sys.executable, "-c", says], {})
    log = Path(str(caught.value).rpartition(" ")[2])
    assert "make: stopped" in log.read_text()
    log.unlink()
    assert "40 %" in capfd.readouterr().err


@pytest.mark.programs
def test_a_missing_horovod_is_one_line_with_the_command() -> None:
    code = (
        "import sys; sys.modules['horovod'] = None\nfrom distcore.cli.main import main;"
        " sys.exit(main(['train', '--strategy', 'horovod', '--nproc', '2']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: strategy 'horovod' is installed (distcore-horovod 0.1.0) but does not import"
    )
    assert done.stderr.endswith("build it for the installed torch with: distcore-horovod build\n")
    assert done.stderr.count("\n") == 1


def test_an_unknown_command_shows_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["biuld"]) == 2
    assert capsys.readouterr().err.startswith(
        "error: no command 'biuld'\nusage: distcore-horovod build"
    )


def test_an_installed_horovod_for_this_torch_is_left_alone() -> None:
    pytest.importorskip("horovod.torch", reason="Horovod is not built here: distcore-horovod build")
    assert build.main(["--if-missing"]) == 0
    assert build.is_installed()


def test_a_build_for_another_torch_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("horovod.torch", reason="Horovod is not built here: distcore-horovod build")
    monkeypatch.setattr(recipe, "key", lambda *built_in: "torch-0.0.0-elsewhere")
    assert not build.is_installed()


@pytest.mark.parametrize(("preprocessor", "mpi"), [("exit 1", False), ("grep -q mpi.h", True)])
def test_mpi_is_built_in_only_where_its_headers_are(
    preprocessor: str, mpi: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler = tmp_path / "mpicxx"
    compiler.write_text(f"#!/bin/sh\n{preprocessor}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert recipe.find_features().mpi is mpi
    assert ("HOROVOD_WITH_MPI" in recipe.environment(tmp_path)) is mpi


def test_a_build_that_works_stays_when_the_machine_gets_mpi(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("horovod.torch", reason="Horovod is not built here: distcore-horovod build")
    monkeypatch.setattr(recipe, "find_features", lambda: recipe.Features(mpi=True, nccl=False))
    assert build.is_installed()
