import re
from dataclasses import replace
from importlib.metadata import distribution
from pathlib import Path

import pytest
from kernel_muster.registry.backends.builder import Builder
from kernel_muster.registry.backends.nvrtc.headers import find_toolkit
from kernel_muster.registry.backends.request import BuildFailure


def _install(site: Path, name: str, version: str, *files: str) -> None:
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{file},sha256=x,1\n" for file in files))
    for file in files:
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_text("")


def test_toolkit_is_that_of_the_installed_wheels():
    toolkit = find_toolkit()
    nvrtc = "nvidia-cuda-nvrtc" if toolkit.major == 13 else "nvidia-cuda-nvrtc-cu12"
    assert toolkit.compiler == f"NVRTC {distribution(nvrtc).version}"
    assert len(toolkit.versions) == 3
    for name, version in toolkit.versions:
        assert distribution(name).version == version
        assert f"{name} {version}" in toolkit.identity
    for header in ("cuda_bf16.h", "crt/host_defines.h", "cuda/std/cstdint"):
        assert any((folder / header).is_file() for folder in toolkit.include_dirs)


def test_no_compiler_wheel_is_toolchain_missing_and_says_what_to_install(tmp_path):
    _install(tmp_path, "nvidia-cuda-runtime", "13.0.1", "nvidia/cu13/include/cuda_runtime.h")
    with pytest.raises(BuildFailure, match="TOOLCHAIN_MISSING: no NVRTC wheel is installed") as caught:
        find_toolkit([str(tmp_path)])
    assert "install kernel-muster[nvrtc13,numba13]" in caught.value.remedies


def test_cuda_13_is_preferred_and_its_include_folders_are_found(tmp_path):
    _install(tmp_path, "nvidia-cuda-nvrtc-cu12", "12.9.1")
    _install(tmp_path, "nvidia_cuda_nvrtc", "13.1.2")
    _install(tmp_path, "nvidia-cuda-runtime", "13.1.3", "nvidia/cu13/include/cuda_runtime.h")
    _install(tmp_path, "nvidia-cuda-cccl", "13.0.0", "nvidia/cu13/include/cccl/cuda/std/version")
    toolkit = find_toolkit([str(tmp_path)])
    include = tmp_path / "nvidia/cu13/include"
    assert (toolkit.major, toolkit.nvrtc, toolkit.include_dirs) == (13, "13.1.2", (include, include / "cccl"))
    assert toolkit.versions == (("nvidia-cuda-runtime", "13.1.3"), ("nvidia-cuda-cccl", "13.0.0"))


def test_cuda_12_wheels_have_their_folders_each(tmp_path):
    _install(tmp_path, "nvidia-cuda-nvrtc-cu12", "12.9.1")
    _install(tmp_path, "nvidia-cuda-runtime-cu12", "12.9.1", "nvidia/cuda_runtime/include/cuda_runtime.h")
    _install(tmp_path, "nvidia-cuda-nvcc-cu12", "12.9.1", "nvidia/cuda_nvcc/include/crt/host_defines.h")
    folders = find_toolkit([str(tmp_path)]).include_dirs
    assert folders == (tmp_path / "nvidia/cuda_runtime/include", tmp_path / "nvidia/cuda_nvcc/include")


def test_wheel_whose_files_are_gone_does_not_count(tmp_path):
    _install(tmp_path, "nvidia-cuda-nvrtc", "13.1.2")
    _install(tmp_path, "nvidia-cuda-runtime", "13.1.3", "nvidia/cu13/include/cuda_runtime.h")
    (tmp_path / "nvidia/cu13/include/cuda_runtime.h").unlink()
    assert find_toolkit([str(tmp_path)]).versions == ()


@pytest.mark.parametrize(("missing", "include"), [(1, "mma.h"), (2, "cuda/std/cstdint"), (0, "cuda_fp8.h")])
def test_header_of_a_wheel_that_is_not_installed_names_the_wheel(builder, make_request, tmp_path, missing, include):
    toolkit = builder.toolkit
    wheel = toolkit.versions[missing][0]
    links = tmp_path / "include"
    links.mkdir()
    for folder in toolkit.include_dirs:
        for path in folder.iterdir():
            owner = 1 if path.name == "crt" else 2 if path.name in ("cccl", "cuda", "cub", "thrust", "nv") else 0
            if owner != missing and not (links / path.name).exists():
                (links / path.name).symlink_to(path)
    without = replace(
        toolkit, include_dirs=(links,), versions=tuple(v for i, v in enumerate(toolkit.versions) if i != missing)
    )
    text = f'#include <{include}>\nextern "C" __global__ void scale(float* o) {{ *o = 1; }}'
    with pytest.raises(BuildFailure, match="HEADERS_MISSING") as caught:
        Builder(toolkit=without).build(make_request(text, ("ptr",)))
    assert re.search(rf"was not found: it comes with the wheel {wheel}, which is not installed", caught.value.why)
    assert caught.value.remedies == (f"install kernel-muster[nvrtc{toolkit.major},numba{toolkit.major}]",)
