"""Sources of kernels: headers that are found, parameters that have one name, files that a compiler opens by themselves."""

from pathlib import Path

import pytest

import convoy.engines.hopper
from convoy.engines.hopper import nvrtc_kernel
from convoy.engines.hopper.nvrtc_source import (
    closure,
    config_header,
    header_text,
    kernel_source,
    kernel_text,
    parameter_defaults,
)
from convoy.errors import InputError

HERE = Path(convoy.engines.hopper.__file__).parent
KERNELS = sorted(path.stem for path in (HERE / "kernels").glob("*.cu"))
SOURCES = sorted([*(HERE / "kernels").glob("*.cu"), *(HERE / "include").rglob("*.cuh")])


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_compiles_alone_with_its_defaults(kernel):
    """To PTX: what an editor with `compile_commands.json` sees."""
    bindings = pytest.importorskip("cuda.bindings.nvrtc")
    try:
        bindings.nvrtcVersion()
    except RuntimeError as error:
        pytest.skip(str(error))
    ptx, _ = nvrtc_kernel.compile_source("a test", kernel_source(kernel, {}), "compute_90a", ())
    assert b".entry " in ptx
    assert b".global .align" not in ptx, "a constexpr variable got a global of its own: make it an enumerator"


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_header_is_guarded_and_each_parameter_is_in_one(kernel):
    found = closure(kernel_text(kernel))
    assert all("#pragma once" in text for text in found.values())
    parameters = [
        name for header in found if header.endswith("_config.cuh") for name in parameter_defaults(found[header])
    ]
    assert len(parameters) == len(set(parameters)) > 0


def test_a_value_for_no_parameter_is_refused():
    with pytest.raises(InputError, match="TILE_X"):
        kernel_source("gated_1x1", {"BLOCK_M": 32, "THREADS": 256, "TILE_X": 1})


def test_parameters_take_the_place_of_defaults():
    header = header_text("igemm/igemm_swap_ab_config.cuh")
    made = config_header(header, {"TILE_N": 96, "STAGED_STORE": 1})
    assert parameter_defaults(made) == parameter_defaults(header) | {"TILE_N": 96, "STAGED_STORE": 1}
    with pytest.raises(InputError, match="TILE_X"):
        config_header(header, {"TILE_X": 1})


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_file_is_long(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 300
