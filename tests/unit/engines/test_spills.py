"""Logs whose spills are counted: every function, stores and loads, and numbers that end in 0."""

import pytest

from tests.unit.engines.spills import assert_no_spills, spilled_bytes


def log_of(*kernels):
    """A log of kernels with (stores, loads)."""
    return "".join(
        f"ptxas info    : Compiling entry function 'kernel{index}' for 'sm_90a'\n"
        f"ptxas info    : Function properties for kernel{index}\n"
        f"    {stores} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads\n"
        "ptxas info    : Used 128 registers, used 1 barriers, 128 bytes stack size\n"
        for index, (stores, loads) in enumerate(kernels)
    )


@pytest.mark.parametrize("kernels", [[(10, 20)], [(0, 0), (10, 0)], [(120, 0), (0, 0)], [(0, 0), (0, 40)], [(4, 4)]])
def test_spills_of_any_kernel_are_seen(kernels):
    assert spilled_bytes(log_of(*kernels)) == [stores + loads for stores, loads in kernels]
    with pytest.raises(AssertionError, match="Compiling entry function"):
        assert_no_spills(log_of(*kernels))


def test_kernels_without_spills_pass():
    assert_no_spills(log_of((0, 0)))
    assert_no_spills(log_of((0, 0), (0, 0)))


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("", "names no kernel"),
        ("    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n", "names no kernel"),
        (log_of((0, 0)) + "ptxas info    : Compiling entry function 'more' for 'sm_90a'\n", "without numbers"),
        (log_of((0, 0)) + "    8 bytes spill stores\n", "another form"),
    ],
)
def test_a_log_that_does_not_say_it_is_refused(log, words):
    with pytest.raises(AssertionError, match=words):
        spilled_bytes(log)
