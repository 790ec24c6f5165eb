"""All kernels under AddressSanitizer and UBSan: `cuda_ext/tests/sanitizer_driver.cpp`, in C++ alone.

The driver checks that posteriors sum to the targets; the sanitizers, that nothing is read or written out of bounds and
that no arithmetic is undefined. The device kernels run in the simulator of `cuda_ext/tests/simt.h`.
"""

import subprocess

import pytest

from exlm_cli.ops.alignment import build

TESTS = build.source_dir() / "tests"
FLAGS = ("-std=c++17", "-g1", "-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.fixture(scope="module", autouse=True)
def _sanitizers(tmp_path_factory):
    source = tmp_path_factory.mktemp("probe") / "empty.cpp"
    source.write_text("int main() {}\n")
    command = [build.find_compiler("cpu"), *FLAGS, str(source), "-o", str(source.with_suffix(""))]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs a compiler with the libraries of AddressSanitizer and UndefinedBehaviorSanitizer")


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",  # nothing is optimised: it compiles in a third of the time, and no access goes unchecked
    [
        ("-march=native", "-pthread"),
        ("-pthread",),
        ("-Wno-attributes", "-DSTATES_ALIGNMENT_ON_DEVICE", "-include", str(TESTS / "simt.h")),
    ],
    ids=["host, this processor", "host, any processor", "device, simulated"],
)
def test_no_kernel_leaves_its_arrays_or_the_language(flags, tmp_path):
    program = tmp_path / "driver"
    command = [build.find_compiler("cpu"), *FLAGS, *flags, str(TESTS / "sanitizer_driver.cpp"), "-o", str(program)]
    subprocess.run(command, check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "clean\n"), done.stderr
