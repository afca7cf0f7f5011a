"""Generated code, word for word: IR, C and CUDA C of one small layer.

To renew a file of `golden/`, delete it and run the test: it writes the file and fails once, so that nobody renews it unseen.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from convoy.engines.sparse_weights import pruned_cuda
from convoy.engines.sparse_weights.codegen import emit_c
from convoy.engines.sparse_weights.codegen.cpu_blocking import plan, write
from convoy.engines.sparse_weights.codegen.kernel_text import parse_kernel, print_kernel
from convoy.engines.sparse_weights.codegen.lower_mask import positions
from convoy.engines.sparse_weights.generated_tile import GeneratedTile
from convoy.problem import ConvProblem, Epilogue, Knobs
from tests.unit.engines.pruned_cases import mask_of

GOLDEN = Path(__file__).parent / "golden"


def layer():
    """Four filters, one of them empty, stride 2, padding 1."""
    nonzero = np.zeros((4, 3, 3, 3), bool)
    for place in ((0, 0, 0, 0), (0, 2, 1, 1), (1, 0, 0, 0), (1, 2, 2, 1), (3, 0, 2, 2), (3, 2, 1, 1)):
        nonzero[place] = True
    epilogue = Epilogue(bias=True, residual=True, activation="relu6")
    return ConvProblem(2, 3, 8, 7, 4, 3, 3, 1, 1, 2, 2, epilogue=epilogue).with_mask(mask_of(nonzero))


def texts():
    """The generated texts by file name."""
    problem = layer()
    mask = positions(problem.mask)
    epilogue = {"bias": True, "residual": True, "activation": "relu6"}
    made = plan(problem, mask, Knobs.of(filters=2, vectors=1, channels=1, lanes=4, threads=1))
    kernel, _ = write(problem, mask, made)
    found = {"kernel.ir": print_kernel(kernel)}
    for index, unit in enumerate(emit_c.emit(kernel, made.layout, **epilogue).units):
        found[f"unit_{index}.c"] = unit
    for arch, lanes in (("avx512", 16), ("avx2", 8)):
        made = plan(problem, mask, Knobs.of(filters=2, vectors=1, channels=1, lanes=lanes, threads=1))
        found[f"{arch}.c"] = emit_c.emit(write(problem, mask, made)[0], made.layout, **epilogue, arch=arch).units[0]
    form = GeneratedTile(lanes=8, vectors=2, filters=2, splits=2, channels=1, shared_kib=1, resident=1)
    written = pruned_cuda.write(problem, form)
    found["staged.ir"] = print_kernel(written.kernel)
    found["values.cu"] = "".join([written.source.head, *written.source.bodies])
    weight = [float(value) / 4 for value in range(problem.weight_spec.elements)]
    source = pruned_cuda.write(problem, replace(form, splits=1, vectors=1), weight).source
    found["immediates.cu"] = "".join([source.head, *source.bodies])
    return found


@pytest.mark.parametrize("name", sorted(texts()))
def test_the_code_is_the_golden_one(name):
    path, text = GOLDEN / name, texts()[name]
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        pytest.fail(f"{name} was not there and has been written: look at it, and commit it")
    assert text == path.read_text(encoding="utf-8")


def test_nothing_golden_is_left_over():
    assert {path.name for path in GOLDEN.iterdir()} == set(texts())


def test_golden_ir_is_read_back():
    for name in ("kernel.ir", "staged.ir"):
        text = (GOLDEN / name).read_text(encoding="utf-8")
        assert print_kernel(parse_kernel(text)) == text


def test_code_depends_on_positions_and_not_on_how_a_problem_was_made():
    problem = layer()
    again = replace(problem.with_mask(None), weight_mask=problem.weight_mask, mask=problem.mask)
    assert again == problem
    mask = positions(again.mask)
    made = plan(again, mask, Knobs.of(filters=2, vectors=1, channels=1, lanes=4, threads=1))
    assert print_kernel(write(again, mask, made)[0]) == (GOLDEN / "kernel.ir").read_text(encoding="utf-8")
