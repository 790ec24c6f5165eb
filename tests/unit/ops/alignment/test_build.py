"""Finding, building and caching the native libraries, with shell scripts in place of compilers.

The files that a build leaves show what it did; a real compiler runs only in the last test.
"""

import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from exlm_cli.ops.alignment import build
from exlm_cli.ops.alignment.build import BuildError

pytestmark = pytest.mark.usefixtures("no_compiler_yet")


def num_builds(tmp_path):
    log = tmp_path / "builds"
    return len(log.read_text().splitlines()) if log.exists() else 0


def assert_refuses(part, function, *arguments):
    with pytest.raises(BuildError, match=re.escape(part)) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)


def test_a_second_build_takes_what_the_first_left(make_compiler, tmp_path):
    make_compiler()
    assert build.find_library("cpu") is None
    with ThreadPoolExecutor(4) as pool:  # of several builders at once, one compiles
        library, *others = pool.map(lambda _: build.build_library("cpu"), range(4))
    assert set(others) == {library}
    assert library.read_text() == "library\n"
    assert build.build_library("cpu") == build.find_library("cpu") == library
    assert num_builds(tmp_path) == 1
    assert {path.suffix for path in library.parent.iterdir()} <= {".so", ".lock"}


def test_a_new_compiler_processor_or_source_gives_a_new_library(make_compiler, tmp_path, monkeypatch):
    make_compiler()
    first = build.build_library("cpu")
    make_compiler(probe="echo version 1 -mavx512f")
    second = build.build_library("cpu")
    make_compiler(probe='case "$*" in *native*) exit 1;; *) echo version 1;; esac')
    portable = build.plan("cpu")
    assert "-march=native" not in portable.command
    sources = tmp_path / "sources"
    (sources / "src").mkdir(parents=True)
    monkeypatch.setattr(build, "source_dir", lambda: sources)
    edited = []
    for text in ("one", "two"):
        (sources / "src" / "log_math.h").write_text(text)
        edited.append(build.plan("cpu").library)
    assert len({first, second, portable.library, *edited}) == 5


def test_a_failed_compilation_leaves_nothing_behind(make_compiler, tmp_path):
    make_compiler(compile_=r"echo note >&2; printf 'x.cpp:3: error: no type \377\n' >&2; exit 1")  # no UTF-8
    assert_refuses("x.cpp:3: error: no type \ufffd", build.build_library, "cpu")
    assert [path.suffix for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"] == []


def test_a_shipped_library_is_found_without_a_compiler(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "source_dir", lambda: tmp_path)
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    assert build.prebuilt_library("cuda") is None
    shipped = tmp_path / "prebuilt" / "libstates_alignment_cuda.so"
    shipped.parent.mkdir()
    shipped.touch()
    assert build.find_library("cuda") == shipped


def test_the_best_shipped_host_library_that_the_processor_can_run_is_taken(make_compiler, tmp_path, monkeypatch):
    make_compiler()
    monkeypatch.setattr(build, "source_dir", lambda: tmp_path)
    (tmp_path / "prebuilt").mkdir()
    best, second = build.build_prebuilt(tmp_path / "prebuilt")
    can_run_all, can_run_second = build.PREBUILT_LEVELS.values()
    for features, found in [(can_run_all, best), (can_run_second, second), (frozenset(["sse2"]), None)]:
        monkeypatch.setattr(build, "_processor_features", lambda features=features: features)
        assert build.prebuilt_library("cpu") == found
    assert build.find_library("cpu") is None, "another processor compiles for itself"


def test_cuda_targets_are_those_that_nvcc_knows_and_ptx_of_the_newest(make_compiler):
    make_compiler("nvcc", probe="printf 'compute_75\\ncompute_80\\ncompute_90\\n'")
    targets = [flag for flag in build.plan("cuda").command if flag.startswith("-gencode")]
    assert targets == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_90,code=compute_90",
    ]
    make_compiler("nvcc", probe="echo compute_35")
    assert_refuses("sm_80, sm_86, sm_89, sm_90, sm_100", build.build_library, "cuda")


def test_the_host_sources_compile_without_a_warning(tmp_path):
    # -O1 follows the flow of values, which warnings need, in half the time of -O3
    flags = ("-O1", "-Wall", "-Wextra", "-Wconversion", "-Werror", "-o", str(tmp_path / "host.so"))
    subprocess.run([*build.plan("cpu").command, *flags], check=True)


def test_a_cache_that_cannot_be_written(make_compiler, tmp_path, monkeypatch):
    make_compiler()
    (tmp_path / "file").touch()
    monkeypatch.setenv("EXLM_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert_refuses(str(tmp_path / "file" / "cache"), build.build_library, "cpu")
