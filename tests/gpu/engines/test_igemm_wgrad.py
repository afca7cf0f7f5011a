"""cuda.wgrad on the GPU: every form exact on integers and within its bounds, the same bits a hundred times, and in a graph."""

import math
from dataclasses import replace

import pytest
import torch

from convoy.engines.base import Buffers
from convoy.engines.hopper import igemm_wgrad
from convoy.engines.hopper.igemm_wgrad_tile_config import IgemmWgradTile as Form
from convoy.engines.hopper.igemm_wgrad_tile_search import forms
from convoy.measurement.accuracy import make_data
from convoy.measurement.device.detect import detect_target
from convoy.problem import ConvProblem
from tests.gpu.engines.exactness import faults

pytestmark = pytest.mark.gpu
ENGINE = igemm_wgrad.ENGINE


@pytest.fixture(scope="module")
def target():
    return detect_target("cuda")


def gradient(*sizes, dtype="bf16", **rest):
    half = {"x_dtype": dtype, "weight_dtype": dtype, "y_dtype": dtype, "numerics": "half"}
    return ConvProblem(*sizes, layout="nhwc", direction="wgrad", **half, **rest)


LAYERS = {
    "1x1": gradient(8, 256, 14, 14, 128, 1, 1),
    "1x1, fp16": gradient(8, 256, 14, 14, 128, 1, 1, dtype="fp16"),
    "1x1, one row of tiles": gradient(4, 72, 9, 11, 40, 1, 1),
    "1x1, stride 2": gradient(32, 512, 14, 14, 1024, 1, 1, 0, 0, 2, 2),
    "3x3": gradient(32, 256, 14, 14, 256, 3, 3, 1, 1),
    "3x3, many filters": gradient(32, 512, 7, 7, 512, 3, 3, 1, 1),
    "3x3, stride 2": gradient(16, 128, 28, 28, 128, 3, 3, 1, 1, 2, 2),
    "3x3, odd sizes": gradient(3, 200, 13, 11, 136, 3, 3, 1, 1),
    "unlike sides, stride, dilation": gradient(2, 64, 23, 25, 136, 3, 2, 2, 1, 2, 3, 2, 3),
    "few columns, many pixels": gradient(32, 64, 56, 56, 64, 1, 1),
    "3x3, few columns": gradient(16, 64, 56, 56, 64, 3, 3, 1, 1),
    "one pixel": gradient(64, 96, 1, 1, 32, 1, 1, dtype="fp16"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_every_form_is_right(name, target):
    problem = LAYERS[name]
    assert [fault for knobs in ENGINE.space(problem, target) for fault in faults(ENGINE, problem, target, knobs)] == []


TILES = [
    Form(rows, columns, pixels, 3, consumers, split, shares)
    for rows, consumers in ((64, 1), (64, 2), (64, 3), (128, 1), (128, 2))
    for columns in (64, 128, 192, 256)
    for pixels, split, shares in ((64, 1, 1), (128, 1, 1), (64, 2, 1), (64, 3, 2), (64, 8, 1))
    if rows // 64 * columns // 2 <= (96 if consumers == 3 else 128)
]
TILES = [form for form in TILES if form.shared_bytes <= 232448 and form.inbox_bytes <= form.ring_bytes]
TILES += [Form(64, 64, 64, 4, 2, 1, 1, 2), Form(64, 192, 64, 3, 1, 2, 1, 2), Form(128, 64, 64, 2, 2, 4, 1, 2)]
TILES += [Form(128, 192, 64, 4, 2), Form(128, 192, 64, 4, 1)]


@pytest.mark.parametrize("form", TILES, ids=lambda form: str(form.knobs))
def test_every_tile_is_exact(form, target):
    """Many groups of columns, so that the leading offset of an operand counts; filters and channels that are not there."""
    problem = gradient(5, 72, 15, 13, 200, 3, 3, 1, 1)
    assert faults(ENGINE, problem, target, form.knobs) == []


@pytest.mark.parametrize("name", ["3x3", "1x1, stride 2", "few columns, many pixels", "3x3, odd sizes"])
def test_a_hundred_runs_have_the_same_bits_and_so_has_a_graph(name, target):
    problem = LAYERS[name]
    x, dy = make_data(problem, 1, "normal", "cuda").args
    kinds = {(form.split > 1, form.shares > 1): form for form in reversed(forms(problem, target.units))}
    for form in kinds.values():
        executable = ENGINE.build(problem, form.knobs, target)
        size = executable.workspace_bytes
        workspace = torch.empty(size, dtype=torch.uint8, device="cuda") if size else None

        def launch(executable=executable, workspace=workspace):
            like = torch.full(problem.weight_spec.shape, math.nan, dtype=x.dtype, device="cuda")
            made = like.contiguous(memory_format=torch.channels_last)
            executable.launch(Buffers((x, dy), [made]), workspace)
            return made

        first = launch()
        assert first.isfinite().all()
        for _ in range(100):
            assert torch.equal(launch(), first), form
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            inside = [launch() for _ in range(4)]
        for _ in range(5):
            for made in inside:
                made.fill_(math.nan)
            graph.replay()
            torch.cuda.synchronize()
            assert all(torch.equal(made, first) for made in inside), form


def test_what_a_launch_wrote_is_read_by_the_next(target):
    """Dependent launches: dy of each is what the one before made of it, as pixels of a 1x1 layer's gradient."""
    problem = gradient(1, 256, 16, 16, 256, 1, 1)
    x, dy = make_data(problem, 1, "normal", "cuda").args
    for form in forms(problem, target.units)[:6]:
        executable = ENGINE.build(problem, form.knobs, target)
        size = executable.workspace_bytes
        workspace = torch.empty(size, dtype=torch.uint8, device="cuda") if size else None

        def chain(wait, executable=executable, workspace=workspace):
            given, made = dy, []
            for _ in range(6):
                # [k, 1, 1, c] as pixels of filters: 256 rows of 256
                dweight = torch.empty(problem.weight_spec.shape, dtype=x.dtype, device="cuda")
                dweight = dweight.contiguous(memory_format=torch.channels_last)
                executable.launch(Buffers((x, given), [dweight]), workspace)
                if wait:
                    torch.cuda.synchronize()
                given = dweight.reshape(1, 16, 16, 256).permute(0, 3, 1, 2)
                given = given.contiguous(memory_format=torch.channels_last)
                made.append(dweight)
            torch.cuda.synchronize()
            return made

        slow, fast = chain(wait=True), chain(wait=False)
        assert all(torch.equal(a, b) for a, b in zip(slow, fast, strict=True)), form


def test_a_form_of_another_problem_is_right_too(target):
    """Knobs are of no problem: those of a large layer do for a small one."""
    small = gradient(2, 64, 9, 9, 64, 3, 3, 1, 1)
    found = [form for form in forms(LAYERS["3x3"], target.units) if form.split == 1]
    assert [fault for form in found[:4] for fault in faults(ENGINE, small, target, replace(form, shares=1).knobs)] == []
