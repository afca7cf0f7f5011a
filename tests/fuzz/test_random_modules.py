"""Random small modules through each public call give what stock PyTorch gives: outputs, gradients, updates, strides, states.

CONVOY_FUZZ_MODULES=N tries so many, CONVOY_FUZZ_SEED=N others, CONVOY_FUZZ_ENGINES=all lets every engine compete for each
(a quarter of them otherwise: Inductor compiles for seconds). A failure names the smallest module found that still fails,
as a script.
"""

import pytest

from tests.fuzz.module_uses import USES, fault, reproducer, shrunk, usable
from tests.fuzz.random_modules import MODULES, SEED, random_sketch

CHUNKS = 4
"""Tests of a use."""

LEAST_OWN = 0.5
"""Share of modules that Convoy runs itself: were all left to PyTorch, nothing would be tested."""


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    """The seed is shown with a failure; the user's database stays out of it."""
    print(f"CONVOY_FUZZ_SEED={SEED}")
    monkeypatch.setenv("CONVOY_DB", str(tmp_path / "perf.db"))


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("use", USES)
@pytest.mark.timeout(0 if MODULES > 100 else 600)
def test_random_modules(use, chunk):
    """Module i is for use i mod 4; one that stock PyTorch cannot use so (no parameter to train) goes to none."""
    tried = own = 0
    faults = []
    for index in range(USES.index(use), MODULES, len(USES)):
        if index // len(USES) % CHUNKS != chunk:
            continue
        sketch = random_sketch(SEED, index)
        if not usable(use, sketch):
            continue
        tried += 1
        found, fell_back = fault(use, sketch)
        own += not fell_back
        if found:
            small = shrunk(use, sketch)
            again = fault(use, small)[0] or f"{found}, and no fault when it was repeated"
            faults.append(f"# module {index}, {use}: {again}\n{reproducer(use, small)}")
    assert not faults, f"{len(faults)} of {tried}; the first:\n{faults[0]}"
    assert own >= LEAST_OWN * tried
