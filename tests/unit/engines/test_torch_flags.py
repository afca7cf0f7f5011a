"""PyTorch's switches for convolutions: held inside, and as they were afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch

from convoy.engines.product_precision import products
from convoy.engines.torch_flags import convolutions, own_precision, unsearched_convolutions

CUDA = torch.device("cuda")


def flags() -> tuple[bool, bool]:
    return torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic


@pytest.mark.parametrize("searches", [False, True])
def test_a_run_without_a_search_leaves_no_plan_for_runs_that_search(
    monkeypatch: pytest.MonkeyPatch, searches: bool
) -> None:
    """PyTorch's key of a cached plan has the deterministic flag, not the one of the search: the two runs must differ in it."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", searches)
    before = flags()
    with unsearched_convolutions(CUDA):
        assert flags() == (False, True)
        with convolutions("as_torch", CUDA):  # what a program's own steps hold
            assert torch.backends.cudnn.benchmark
        assert flags() == (False, True)
    assert flags() == before
    with convolutions("as_torch", CUDA):
        assert flags() == (True, False)
    assert flags() == before


def test_a_cpu_has_no_such_switches() -> None:
    before = flags()
    with unsearched_convolutions(torch.device("cpu")):
        assert flags() == before


BACKENDS: Any = torch.backends
OPERATORS: dict[str, tuple[Any, Any]] = {
    "cudnn.conv": (BACKENDS.cudnn.conv, BACKENDS.cudnn),
    "cuda.matmul": (BACKENDS.cuda.matmul, BACKENDS.cudnn),
    "mkldnn.conv": (BACKENDS.mkldnn.conv, BACKENDS.mkldnn),
    "mkldnn.matmul": (BACKENDS.mkldnn.matmul, BACKENDS.mkldnn),
}


@pytest.fixture
def _precision_flags() -> Iterator[None]:
    yield
    BACKENDS.fp32_precision = "none"
    for owner, backend in OPERATORS.values():
        backend.fp32_precision = "none"
        owner.fp32_precision = "tf32" if owner is BACKENDS.cudnn.conv else "none"  # PyTorch's defaults


@pytest.mark.usefixtures("_precision_flags")
@pytest.mark.parametrize("name", OPERATORS)
def test_the_precision_that_an_operator_has_itself_is_told_from_an_inherited_one(name: str) -> None:
    owner, backend = OPERATORS[name]
    for own, of_backend, general in product(("none", "ieee", "tf32"), repeat=3):
        owner.fp32_precision, backend.fp32_precision, BACKENDS.fp32_precision = own, of_backend, general
        before = (owner.fp32_precision, backend.fp32_precision, BACKENDS.fp32_precision)
        assert own_precision(owner, backend) == own, (own, of_backend, general)
        assert (owner.fp32_precision, backend.fp32_precision, BACKENDS.fp32_precision) == before


@pytest.mark.usefixtures("_precision_flags")
@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("cudnn.conv", lambda: convolutions("strict", CUDA)),
        ("cuda.matmul", lambda: products("strict", CUDA)),
        ("mkldnn.conv", lambda: convolutions("strict", torch.device("cpu"))),
        ("mkldnn.matmul", lambda: products("strict", torch.device("cpu"))),
    ],
)
def test_an_operator_inherits_general_settings_after_its_precision_was_held(
    name: str, exact: Callable[[], Any]
) -> None:
    owner, _ = OPERATORS[name]
    owner.fp32_precision = "none"
    BACKENDS.fp32_precision = "tf32"
    with exact():
        assert owner.fp32_precision == "ieee"
    assert owner.fp32_precision == "tf32"
    BACKENDS.fp32_precision = "ieee"
    assert owner.fp32_precision == "ieee"


@pytest.mark.usefixtures("_precision_flags")
def test_split_k_is_allowed_afterwards_only_if_it_was_before() -> None:
    flags: Any = torch.backends.cuda.matmul
    name = "allow_fp16_reduced_precision_reduction"
    if not hasattr(flags, f"{name}_split_k"):
        pytest.skip("this PyTorch has no switch for split-K")
    try:
        for value in ((True, True), (False, False), (False, True)):
            setattr(flags, name, value)
            torch.backends.cuda.matmul.fp32_precision = "tf32"  # so that the flags must change
            with products("strict", CUDA):
                assert (getattr(flags, name), getattr(flags, f"{name}_split_k")) == (False, value[1])
            assert (getattr(flags, name), getattr(flags, f"{name}_split_k")) == value
    finally:
        setattr(flags, name, (True, True))
