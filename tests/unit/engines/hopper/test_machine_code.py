"""The machine code of the CUDA kernels is the recorded one: see machine_code.py. One case of each engine."""

import pytest

from tests.unit.engines.hopper import machine_code

VERSION, DIGESTS = machine_code.read()
FIRST = {key.split(" | ")[0]: key for key in reversed(DIGESTS)}


@pytest.mark.slow
@pytest.mark.parametrize("key", FIRST.values(), ids=FIRST.keys())
def test_the_ptx_is_the_recorded_one_or_makes_the_same_machine_code(key):
    pytest.importorskip("cuda.bindings.nvrtc")
    try:
        version = machine_code.nvrtc_version()
    except RuntimeError as error:
        pytest.skip(str(error))
    if version != VERSION:
        pytest.skip(f"digests are of NVRTC {VERSION}, here is {version}")
    case = machine_code.case_of(key)
    if machine_code.ptx_of(case)[1] != DIGESTS[key]["ptx"]:
        assert machine_code.compiled(case)[1] == DIGESTS[key]["sass"]
