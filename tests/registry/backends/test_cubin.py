import re
import sys
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_muster.registry.backends import BuildRequest, EntryPoint
from kernel_muster.registry.backends.builder import Builder
from kernel_muster.registry.backends.cubin.cubin import BadCubin, Cubin, inspect_cubin
from kernel_muster.registry.backends.cubin.elf import BadElf, Elf
from kernel_muster.registry.hardware.arch import parse_arch

ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_121a")
SEVERAL = """\
extern "C" __global__ void __launch_bounds__(96) plain(const float* x, unsigned char b, double d, long long n,
                                                        float* o) {
  o[n] = x[threadIdx.x] * d + b;
}
extern "C" __global__ void shared(float* o) {
  __shared__ float s[300];
  s[threadIdx.x] = o[threadIdx.x];
  __syncthreads();
  o[threadIdx.x] = s[299 - threadIdx.x];
}
extern "C" __global__ void stack(float* o, int n) {
  float a[256];
  for (int i = 0; i < 256; ++i) a[i * n & 255] = o[i];
  o[n] = a[n];
}
__device__ __noinline__ float helper(float* o) { return o[threadIdx.x] + 1; }
extern "C" __global__ void caller(float* o) { o[0] = helper(o); }
"""
TYPES = {"plain": ("ptr", "u8", "f64", "i64", "ptr"), "shared": ("ptr",), "stack": ("ptr", "i32"), "caller": ("ptr",)}


def _build(arch: str, folder):
    source = folder / "several.cu"
    source.write_text(SEVERAL)
    entries = tuple(EntryPoint(name, types) for name, types in TYPES.items())
    return Builder().build(BuildRequest("several", source, parse_arch(arch), entries))


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    return _build("sm_90a", tmp_path_factory.mktemp("several"))


@pytest.mark.parametrize("arch", ARCHS)
def test_resources_from_the_file_equal_those_of_the_assemblers_log(arch, tmp_path):
    built = _build(arch, tmp_path)
    cubin = inspect_cubin(built.cubin)
    assert cubin.serves(parse_arch(arch))
    assert sorted(cubin.entries) == sorted(TYPES)
    for name, needs in cubin.entries.items():
        block = built.log.partition(f"Compiling entry function '{name}'")[2].partition("Compiling entry")[0]
        used = re.search(r"Used (\d+) registers(?:.*?, (\d+) bytes smem)?", block)
        assert (needs.registers, needs.static_shared_bytes) == (int(used[1]), int(used[2] or 0))
        assert needs.stack_bytes == int(re.search(r"(\d+) bytes stack frame", block)[1])
    assert cubin.entries["shared"].static_shared_bytes == 1200
    assert cubin.entries["stack"].stack_bytes >= 1024
    assert cubin.entries["plain"].max_threads == 96
    assert cubin.entries["plain"].parameters == ((0, 8), (8, 1), (16, 8), (24, 8), (32, 8))


def test_code_of_another_architecture_or_suffix_does_not_serve():
    assert Cubin((9, 0), "a").serves(parse_arch("sm_90a"))
    assert not Cubin((9, 0), "").serves(parse_arch("sm_90a"))
    assert not Cubin((9, 0), "a").serves(parse_arch("sm_90"))
    assert not Cubin((10, 0), "a").serves(parse_arch("sm_90a"))
    assert Cubin((9, 0), None).serves(parse_arch("sm_90a"))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "not an ELF file: 0 bytes"),
        (b"//\n.version 8.0\n.target sm_90a\n" * 9, "not an ELF file"),
        (b"\x7fELF\x01\x01" + bytes(99), "ELF class and byte order are 0101"),
        (b"\x7fELF\x02\x01" + bytes(99), "the section table has 0 entries"),
    ],
)
def test_bytes_that_are_no_cubin_are_refused(data, expected):
    with pytest.raises(BadCubin, match=expected):
        inspect_cubin(data)


def test_elf_of_a_host_is_refused():
    with open(sys.executable, "rb") as file, pytest.raises(BadCubin, match="ELF machine is "):
        inspect_cubin(file.read())


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9, 0.999])
def test_truncated_cubin_is_refused(several, keep):
    with pytest.raises(BadCubin, match=r"truncated|damaged|ends at|ELF"):
        inspect_cubin(several.cubin[: int(len(several.cubin) * keep)])


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_cubin_is_read_or_refused_and_never_crashes(several, data):
    damaged = bytearray(several.cubin)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.one_of(st.just(len(damaged)), st.integers(0, len(damaged))))
    with suppress(BadCubin):
        assert isinstance(inspect_cubin(bytes(damaged[:end])), Cubin)


def test_every_damaged_byte_of_the_tables_is_read_or_refused(several):
    tables = Elf(several.cubin)
    interesting = [*range(64), *range(len(several.cubin) - 64 * len(tables.sections), len(several.cubin))]
    for position in interesting[::3]:
        for value in (0, 0xFF, several.cubin[position] ^ 1):
            damaged = several.cubin[:position] + bytes([value]) + several.cubin[position + 1 :]
            with suppress(BadCubin):
                assert isinstance(inspect_cubin(damaged), Cubin)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_behind_an_elf_head_are_refused(tail):
    with pytest.raises(BadElf):
        Elf(b"\x7fELF\x02\x01" + tail)
