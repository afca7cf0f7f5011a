"""The cudnn engine against a stand-in for the frontend: names, lists, notes, and every launch on the CPU."""

import re
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from convoy.engines.base import Buffers
from convoy.engines.compilers import host_compiler
from convoy.engines.library import cudnn
from convoy.engines.library.cudnn import ENGINE, graphs, library, plans, surveys
from convoy.engines.library.cudnn.plans import CudnnPlan, Facts
from convoy.errors import CompileError, InputError, LaunchError
from convoy.measurement.accuracy import judge, make_data
from convoy.problem import Conv3dProblem, ConvProblem, Epilogue, Knobs, LinearProblem
from convoy.target import Target
from tests.unit.engines.fake_cudnn import Behaviour, Mode, NotSupportedError, frontend, nameless, plan

H100 = Target("cuda", "NVIDIA H100 80GB HBM3", "sm_90", 132, 80 << 30, 50 << 20, (("cudnn", "9.19.0"),))
CPU = Target("cpu", "any", "avx2", 2, 8 << 30, 0)
FULL = Epilogue(bias=True, residual=True, activation="relu")
PLAIN = ConvProblem(2, 8, 9, 7, 16, 3, 3, 1, 1)


def typed(problem, dtype, **rest):
    return replace(problem, x_dtype=dtype, weight_dtype=dtype, y_dtype=dtype, **rest)


def clear():
    library.absence.cache_clear()
    cudnn.offered_plans.cache_clear()
    surveys.known_workspaces.cache_clear()
    plans.facts.cache_clear()
    plans.noted.cache_clear()


@pytest.fixture
def install(monkeypatch, tmp_path):
    """A function that puts a fake frontend, a fake GPU and an empty cache folder in place."""

    def put(*table):
        made = frontend(*table)
        folder = tmp_path / f"compiled{len(list(tmp_path.iterdir()))}"
        folder.mkdir(mode=0o700)
        monkeypatch.setattr(host_compiler, "compiled_folder", lambda: folder)
        monkeypatch.setattr(library, "load", lambda: made)
        monkeypatch.setattr(library, "HANDLES", library.Handles())
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
        clear()
        return made

    yield put
    clear()


def names(problem, target=H100):
    return [(str(knobs["plan"]), knobs["fused"]) for knobs in ENGINE.space(problem, target)]


# --- names --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (CudnnPlan(0), "eng0"),
        (CudnnPlan(62, ((2, 5), (15, -1))), "eng62_k2-5_k15--1"),
        (CudnnPlan(46, ((0, -2), (5, 2)), listed=True), "eng46_b0--2_b5-2"),
    ],
)
def test_names_are_read_back_and_fit_into_knobs(made, name):
    assert made.name == name
    assert CudnnPlan.parse(name) == made
    knobs = Knobs.of(plan=name, fused=True)
    assert Knobs.parse(str(knobs)) == knobs


@pytest.mark.parametrize(
    "name",
    ["", "eng", "eng3_k2", "eng3_k2=5", "eng3_k2-5_b3-1", "eng3_k3-1_k2-5", "eng3_k2-1_k2-1", "ENG3", "eng3_k2-5 "],
)
def test_other_words_are_no_names(name):
    with pytest.raises(InputError, match="plan"):
        CudnnPlan.parse(name)


# --- what is offered ----------------------------------------------------------------------------------------------------


def test_plans_keep_the_order_of_the_heuristics_once_each(install):
    install(
        plan(9, modes=(Mode.FALLBACK,)),
        plan(3, knobs={1: 4, 2: 8}, modes=(Mode.A, Mode.B)),
        plan(3, knobs={2: 8, 1: 5}, modes=(Mode.B,)),
        nameless(46, 5, 14, modes=(Mode.A,)),
    )
    assert names(PLAIN) == [
        ("eng3_k1-4_k2-8", False),
        ("eng46_b5--5_b14--14", False),
        ("eng3_k1-5_k2-8", False),
        ("eng9", False),
    ]


def test_fused_and_separate_epilogues_take_turns(install):
    install(plan(1), plan(2))
    both = [("eng1", True), ("eng1", False), ("eng2", True), ("eng2", False)]
    assert names(replace(PLAIN, epilogue=FULL)) == both
    assert names(replace(PLAIN, epilogue=Epilogue(activation="hardswish"))) == [("eng1", False), ("eng2", False)]
    assert names(replace(PLAIN, epilogue=Epilogue(bias=True, activation="hardswish"))) == both
    assert names(replace(PLAIN, direction="wgrad", epilogue=Epilogue(bias=True))) == [("eng1", False), ("eng2", False)]


def test_where_nothing_fuses_separate_epilogues_are_left(install):
    install(plan(1)).refuses_fusion = True
    assert names(replace(PLAIN, epilogue=FULL)) == [("eng1", False)]


def test_offers_are_bounded_and_asked_for_once(install):
    fake = install(*(plan(i) for i in range(cudnn.MOST_PLANS + 20)))
    assert names(PLAIN) == [(f"eng{i}", False) for i in range(cudnn.MOST_PLANS)]
    assert ENGINE.supports(PLAIN, H100)
    assert names(PLAIN) == names(PLAIN)
    assert fake.queries == 1


def test_another_process_asks_cudnn_for_nothing_again(install):
    fake = install(plan(1, workspace=512), plan(2), nameless(46, 5, workspace=64))
    fake.refuses_fusion = True
    fused = replace(PLAIN, epilogue=FULL)
    found, queries = names(fused), fake.queries
    assert queries > 0
    clear()  # what a new process has
    fake.table.clear()
    assert names(fused) == found
    assert [ENGINE.workspace_bytes(fused, knobs) for knobs in ENGINE.space(fused, H100)] == [512, 0, 64]
    assert fake.queries == queries
    other = replace(H100, versions=(("cudnn", "9.20.0"),))
    assert "no plan" in ENGINE.supports(fused, other).reason


def test_convolutions_that_differ_in_what_follows_the_graph_share_an_answer(install, monkeypatch):
    install(plan(1), plan(2))
    asked = []
    ask = surveys.recommending
    monkeypatch.setattr(surveys, "recommending", lambda *graph: asked.append(graph[1]) or ask(*graph))
    relu = replace(PLAIN, epilogue=Epilogue(bias=True, activation="relu"))
    hardswish = replace(PLAIN, epilogue=Epilogue(bias=True, activation="hardswish"))  # no operation of cuDNN's
    biased = replace(PLAIN, epilogue=Epilogue(bias=True))
    offers = [names(problem) for problem in (PLAIN, relu, hardswish, biased)]
    assert asked == [Epilogue(), relu.epilogue, biased.epilogue]
    assert offers[2] == offers[3]
    clear()
    assert [names(problem) for problem in (biased, hardswish, relu, PLAIN)] == offers[::-1]
    assert len(asked) == 3
    knobs = ENGINE.space(hardswish, H100)[0]
    assert not ENGINE.asks_for_workspace(hardswish, knobs)


def test_a_refusal_is_kept_and_another_error_is_not(install, monkeypatch):
    fake = install()
    for _ in range(2):
        assert "No valid engine configs" in ENGINE.supports(PLAIN, H100).reason
        assert fake.queries == 1
        clear()
    asked = []
    monkeypatch.setattr(surveys, "recommending", lambda *_: asked.append(0) or int("out of memory"))
    for _ in range(2):
        assert "out of memory" in ENGINE.supports(replace(PLAIN, n=3), H100).reason
    assert len(asked) == 2


@pytest.mark.parametrize("text", ["[]", "{}", '{"plans": 3}', '{"plans": [["eng1"]]}', '{"plans": [["best", 0]]}', "\x00",
                                  '{"plans": [["eng1", -1]]}', '{"plans": [["eng1", true]]}'])  # fmt: skip
def test_an_answer_in_another_form_is_asked_for_again(install, monkeypatch, text):
    install(plan(1))
    monkeypatch.setattr(surveys, "cached", lambda *_, **__: text.encode())
    assert names(PLAIN) == [("eng1", False)]


def test_the_workspace_of_a_recommended_plan_needs_no_query(install, monkeypatch):
    install(
        plan(3, knobs={1: 4, 2: 8}, workspace=7),
        plan(3, knobs={1: 5, 2: 9}),
        plan(3, knobs={1: 5, 2: 8}, modes=(), workspace=9),
    )
    first, second, beyond, *_ = ENGINE.space(PLAIN, H100)
    assert [ENGINE.asks_for_workspace(PLAIN, knobs) for knobs in (first, second, beyond)] == [False, False, True]
    assert ENGINE.workspace_bytes(PLAIN, beyond) == 9
    with monkeypatch.context() as patch:
        patch.setattr(plans, "facts", lambda *_: pytest.fail("asked"))
        assert ENGINE.workspace_bytes(PLAIN, first) == 7


def test_neighbours_of_the_first_plans_come_last_and_may_be_refused(install):
    install(
        plan(3, knobs={1: 4, 2: 8}),
        plan(3, knobs={1: 5, 2: 9}),
        plan(9),
        plan(3, knobs={1: 5, 2: 8}, modes=()),  # there, and recommended by nobody
    )
    assert names(PLAIN) == [
        ("eng3_k1-4_k2-8", False),
        ("eng3_k1-5_k2-9", False),
        ("eng9", False),
        ("eng3_k1-5_k2-8", False),
        ("eng3_k1-4_k2-9", False),
    ]
    there, refused = (Knobs.of(plan=name, fused=False) for name in ("eng3_k1-5_k2-8", "eng3_k1-4_k2-9"))
    assert ENGINE.build(PLAIN, there, H100).deterministic
    with pytest.raises(CompileError, match="eng3_k1-4_k2-9"):
        ENGINE.build(PLAIN, refused, H100)


def test_engines_of_the_frontend_and_plans_that_cudnn_refuses_are_left_out(install):
    install(plan(20_400), plan(1, workspace=-5, refuses="CUDNN_STATUS_NOT_SUPPORTED"), plan(2))
    assert names(PLAIN) == [("eng2", False)]


TF32 = [
    plan(1, notes=("TENSOR_CORE",)),
    plan(2, notes=("WINOGRAD",)),
    plan(3, notes=("TENSOR_CORE", "DOWN_CONVERT_INPUTS")),
    plan(4, notes=("FFT", "NONDETERMINISTIC")),
    plan(5),
]


def test_exact_numerics_take_no_tensor_cores_and_transforms_last_and_strict_ones_none(install):
    install(*TF32)
    everything = [(f"eng{i}", False) for i in range(1, 6)]
    exact = [("eng5", False), ("eng2", False), ("eng4", False)]
    assert names(PLAIN) == everything
    assert names(replace(PLAIN, numerics="strict")) == exact[:1]
    assert names(PLAIN, replace(H100, versions=(("cudnn_tf32", "off"),))) == exact
    assert names(replace(PLAIN, numerics="half"), replace(H100, versions=(("cudnn_tf32", "off"),))) == everything
    assert names(typed(PLAIN, "fp16", numerics="strict")) == everything


def test_strict_numerics_build_no_tensor_cores_either(install):
    install(*TF32)
    knobs = Knobs.of(plan="eng1", fused=False)
    assert ENGINE.build(PLAIN, knobs, H100).deterministic
    with pytest.raises(CompileError, match="rounds operands"):
        ENGINE.build(replace(PLAIN, numerics="strict"), knobs, H100)


def test_strict_numerics_build_no_transforms_either(install):
    install(*TF32)
    exact_here = replace(H100, versions=(("cudnn_tf32", "off"),))
    for number in (2, 4):
        knobs = Knobs.of(plan=f"eng{number}", fused=False)
        assert ENGINE.build(PLAIN, knobs, exact_here) is not None
        with pytest.raises(CompileError, match="rounds relative to the largest value of a tile"):
            ENGINE.build(replace(PLAIN, numerics="strict"), knobs, H100)
    assert ENGINE.build(replace(PLAIN, numerics="strict"), Knobs.of(plan="eng5", fused=False), H100).deterministic


def test_denied_engines_are_neither_offered_nor_built(install, monkeypatch):
    install(plan(1), plan(2))
    monkeypatch.setattr(plans, "DENIED", {("fprop", "nchw", 1): "wrong at stride 2"})
    assert names(PLAIN) == [("eng2", False)]
    assert names(replace(PLAIN, direction="dgrad")) == [("eng1", False), ("eng2", False)]
    with pytest.raises(CompileError, match="engine 1 is denied: wrong at stride 2"):
        ENGINE.build(PLAIN, Knobs.of(plan="eng1", fused=False), H100)


def test_every_denial_has_a_reason_a_direction_and_a_layout():
    for (direction, layout, _), reason in plans.DENIED.items():
        assert direction in ("fprop", "dgrad", "wgrad")
        assert layout in ("nchw", "nhwc")
        assert reason


# --- what is known before a build ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "facts"),
    [
        (plan(1, workspace=512), Facts(512, deterministic=True, exact=True)),
        (plan(1, ("TENSOR_CORE",), 0), Facts(0, deterministic=True, exact=False)),
        (plan(1, ("NONDETERMINISTIC",), 8), Facts(8, deterministic=False, exact=True)),
        (plan(1, ("NONDETERMINISTIC", "TENSOR_CORE"), 9), Facts(9, deterministic=False, exact=False)),
    ],
)
def test_facts_come_without_a_build(install, entry, facts):
    fake = install(entry)
    assert plans.facts(PLAIN, Epilogue(), CudnnPlan(1), 0) == facts
    assert ENGINE.workspace_bytes(PLAIN, Knobs.of(plan="eng1", fused=False)) == facts.workspace_bytes
    assert fake.builds == fake.queries == 0
    assert ENGINE.build(PLAIN, Knobs.of(plan="eng1", fused=False), H100).deterministic == facts.deterministic


def test_a_plan_without_words_for_its_knobs_is_found_in_the_list(install):
    fake = install(plan(1), nameless(46, 5, workspace=64))
    executable = ENGINE.build(PLAIN, Knobs.of(plan="eng46_b5--5", fused=False), H100)
    assert executable.workspace_bytes == 64
    assert fake.queries > 0
    with pytest.raises(CompileError, match="no longer recommend"):
        ENGINE.build(PLAIN, Knobs.of(plan="eng46_b5--6", fused=False), H100)


def test_notes_are_cudnns_words(install):
    entry = plan(1, ("TENSOR_CORE", "WINOGRAD_TILE_4x4"), 4, behaviours=(Behaviour.RUNTIME_COMPILATION,))
    install(entry, plan(2))
    assert ENGINE.notes(PLAIN, Knobs.of(plan="eng1", fused=False)) == (
        "runtime_compilation",
        "tensor_core",
        "winograd_tile_4x4",
    )
    assert ENGINE.notes(PLAIN, Knobs.of(plan="eng2", fused=False)) == ()
    with pytest.raises(InputError, match="Invalid engine id"):
        ENGINE.notes(PLAIN, Knobs.of(plan="eng3", fused=False))


def test_a_plans_algorithm_is_told_by_its_notes(install, monkeypatch):
    table = [
        plan(1, ("TENSOR_CORE",)),
        plan(2, ("WINOGRAD_TILE_4x4", "NONDETERMINISTIC")),
        plan(3, ("FFT",)),
        plan(4),
    ]
    install(*table)
    told = [ENGINE.algorithm(PLAIN, Knobs.of(plan=f"eng{i}", fused=False)) for i in (1, 2, 3, 4, 5)]
    assert told == ["implicit_gemm, tensor_core", "winograd, nondeterministic", "fft", "implicit_gemm", "library"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    clear()
    assert ENGINE.algorithm(PLAIN, Knobs.of(plan="eng3", fused=False)) == "library"


@pytest.mark.parametrize(
    ("knobs", "says"),
    [
        (Knobs(), "fused .true or false. and plan"),
        (Knobs.of(plan="eng1"), "fused .true or false. and plan"),
        (Knobs.of(plan="eng1", fused=1), "fused .true or false. and plan"),
        (Knobs.of(plan="winograd", fused=False), "eng62_k2-5_k6-1"),
        (Knobs.of(plan="eng7", fused=False), "Invalid engine id"),
        (Knobs.of(plan="eng1_k1-4", fused=False), "Invalid engine id"),
        (Knobs.of(plan="eng1_k99-4", fused=False), "99 is not a valid"),
        (Knobs.of(plan="eng1", fused=True), "no epilogue"),
    ],
)
def test_knobs_that_name_no_plan_are_compile_errors(install, knobs, says):
    install(plan(1))
    with pytest.raises(CompileError, match=says):
        ENGINE.build(PLAIN, knobs, H100)


def test_what_cudnn_says_of_a_failed_build_is_in_the_log(install):
    fake = install(plan(1, workspace=3, refuses="CUDNN_STATUS_EXECUTION_FAILED\nptxas says no"))
    with pytest.raises(CompileError) as caught:
        ENGINE.build(PLAIN, Knobs.of(plan="eng1", fused=False), H100)
    assert "ptxas says no" in caught.value.log
    fake.table[0].refuses, fake.grows = "", 5
    with pytest.raises(CompileError, match="wants 8 bytes of workspace, announced 3"):
        ENGINE.build(PLAIN, Knobs.of(plan="eng1", fused=False), H100)


# --- refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("problem", "target", "says"),
    [
        (PLAIN, CPU, "needs an NVIDIA GPU, got cpu"),
        (LinearProblem(1, 8, 8), H100, "computes convolutions only"),
        (typed(PLAIN, "fp64", acc_dtype="fp64"), H100, "needs fp32, fp16 or bf16, got fp64"),
        (replace(PLAIN, y_dtype="fp16"), H100, "one dtype"),
        (replace(PLAIN, layout="blocked"), H100, "got blocked"),
        (replace(PLAIN, n=0), H100, "needs a batch of at least 1, got 0"),
        (typed(PLAIN, "fp16", acc_dtype="fp16"), H100, "accumulates in fp32, got acc_dtype fp16"),
        (typed(PLAIN, "bf16"), replace(H100, arch="sm_75"), "bf16 needs compute capability 8.0 or newer, got sm_75"),
        (PLAIN, replace(H100, arch="sm_61"), "fp32 needs compute capability 7.0"),
        (replace(PLAIN, n=1 << 22), H100, "fewer than 2.31 elements"),
        (replace(PLAIN, direction="dgrad", epilogue=FULL), H100, "a data gradient has no epilogue"),
    ],
)
def test_refusals_name_what_was_needed_and_found(install, problem, target, says):
    fake = install(plan(1))
    support = ENGINE.supports(problem, target)
    assert not support
    assert re.search(says, support.reason), support.reason
    assert fake.queries == 0


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    clear()
    assert "needs an NVIDIA GPU" in ENGINE.supports(PLAIN, H100).reason
    clear()


@pytest.mark.parametrize("raised", [ModuleNotFoundError("No module named 'cudnn'"), OSError("libcuda.so.1")])
def test_without_the_package_it_says_what_to_install(install, monkeypatch, raised):
    install(plan(1))

    def load():
        raise raised

    monkeypatch.setattr(library, "load", load)
    assert ENGINE.supports(PLAIN, H100).reason == "needs nvidia-cudnn-frontend: pip install 'convoy-cnn[gpu]'"


def test_old_and_broken_installations_are_told_apart(install):
    fake = install(plan(1))
    fake.backend_version = lambda: 90100
    assert ENGINE.supports(PLAIN, H100).reason == "needs cuDNN 9.2 or newer, got 90100"

    def symbol():
        raise RuntimeError("Unable to find symbol cudnnGetVersion")

    fake.backend_version = symbol
    clear()
    assert "needs libcudnn" in ENGINE.supports(PLAIN, H100).reason
    fake.pygraph = SimpleNamespace(create_execution_plan=None)
    clear()
    assert (
        "needs an nvidia-cudnn-frontend with get_engine_and_knobs_at_index, got 1.99"
        in ENGINE.supports(PLAIN, H100).reason
    )


def test_a_problem_without_plans_is_refused_in_one_line(install):
    fake = install()
    support = ENGINE.supports(PLAIN, H100)
    assert support.reason == "cuDNN has no plan for this problem: No valid engine configs for ConvFwd_"
    fake.table.append(plan(1, notes=("TENSOR_CORE",)))
    assert ENGINE.supports(PLAIN, replace(H100, versions=(("cudnn", "9.20.0"),)))
    assert "keeps the numerics" in ENGINE.supports(replace(PLAIN, numerics="strict"), H100).reason


def test_importing_the_engine_imports_no_frontend():
    code = "import sys, convoy.engines.library.cudnn; sys.exit('cudnn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- launches -----------------------------------------------------------------------------------------------------------


def shapes():
    for layout in ("nchw", "nhwc"):
        base = replace(PLAIN, layout=layout)
        for epilogue in (
            Epilogue(),
            FULL,
            Epilogue(bias=True),
            Epilogue(residual=True, activation="relu6"),
            Epilogue(bias=True, activation="silu"),
            Epilogue(bias=True, residual=True, activation="hardswish"),
            Epilogue(activation="gelu"),
            Epilogue(residual=True, activation="sigmoid"),
        ):
            yield replace(base, epilogue=epilogue)
        yield replace(base, groups=4, stride_h=2, stride_w=2, epilogue=FULL)
        yield replace(base, r=1, s=1, pad_h=0, pad_w=0, epilogue=FULL)
        yield replace(base, dilation_h=2, pad_h=2, stride_w=3)
        for direction in ("dgrad", "wgrad"):
            yield replace(base, direction=direction)
            yield replace(base, direction=direction, stride_h=2, pad_w=0, groups=2)
        yield replace(base, direction="wgrad", epilogue=Epilogue(bias=True))


@pytest.mark.parametrize("problem", list(shapes()), ids=str)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_launches_give_the_right_answer(install, problem, dtype):
    install(plan(1, workspace=256))
    problem = typed(problem, dtype, numerics="half" if dtype == "fp16" else "strict")
    assert ENGINE.supports(problem, H100)
    for knobs in ENGINE.space(problem, H100):
        executable = ENGINE.build(problem, knobs, H100)
        assert not executable.allocates_results
        for kind in ("integer", "normal"):
            verdict = judge(executable, ENGINE.family, problem, make_data(problem, 3, kind), kind)
            assert verdict.ok, f"{knobs}: {verdict.reason}"


VOLUME = Conv3dProblem(2, 4, (5, 4, 6), 8, (3, 2, 3), (1, 0, 2), (2, 1, 1), (1, 2, 1), 2)


@pytest.mark.parametrize("layout", ["ncdhw", "ndhwc"])
@pytest.mark.parametrize(
    ("direction", "epilogue"),
    [("fprop", FULL), ("dgrad", Epilogue()), ("wgrad", Epilogue()), ("wgrad", Epilogue(bias=True))],
)
def test_launches_on_volumes_give_the_right_answer(install, layout, direction, epilogue):
    install(plan(1, workspace=256))
    problem = replace(VOLUME, layout=layout, direction=direction, epilogue=epilogue, dtype="fp16", numerics="half")
    assert ENGINE.supports(problem, H100)
    assert [str(knobs["fused"]) for knobs in ENGINE.space(problem, H100)] == ["True", "False"][direction != "fprop" :]
    for knobs in ENGINE.space(problem, H100):
        executable = ENGINE.build(problem, knobs, H100)
        for kind in ("integer", "normal"):
            verdict = judge(executable, ENGINE.family, problem, make_data(problem, 3, kind), kind)
            assert verdict.ok, f"{knobs}: {verdict.reason}"


def test_strides_of_volumes_are_those_of_torch():
    shape = (2, 3, 4, 5, 6)
    assert graphs.strides(shape, "ncdhw") == list(torch.empty(shape).stride())
    last = torch.empty(shape, memory_format=torch.channels_last_3d)
    assert graphs.strides(shape, "ndhwc") == list(last.stride())


def prepared(problem):
    data = make_data(problem, 1)
    executable = ENGINE.build(problem, ENGINE.space(problem, H100)[0], H100)
    y = torch.empty(problem.y_spec.shape)
    return executable, Buffers(data.args, [y], executable.pack(data.constants)), torch.empty(256, dtype=torch.uint8)


def wrong_strides(monkeypatch):
    right = graphs.strides
    monkeypatch.setattr(graphs, "strides", lambda shape, layout: right(shape, "nchw"))


def bias_after_activation(monkeypatch):
    monkeypatch.setattr(
        cudnn, "_read", lambda problem, knobs: (CudnnPlan(1), Epilogue(residual=True, activation="relu"))
    )


def no_activation(monkeypatch):
    monkeypatch.setitem(graphs.ACTIVATIONS, "relu", ("relu", {"lower_clip": -1e30}))


@pytest.mark.parametrize("fault", [wrong_strides, bias_after_activation, no_activation])
def test_a_planted_fault_is_seen(install, monkeypatch, fault):
    install(plan(1))
    problem = replace(PLAIN, layout="nhwc", epilogue=FULL)
    fault(monkeypatch)
    executable = ENGINE.build(problem, Knobs.of(plan="eng1", fused=True), H100)
    assert not judge(executable, ENGINE.family, problem, make_data(problem, 3), "normal").ok


def test_buffers_that_cudnn_would_misread_are_refused(install):
    fake = install(plan(1, workspace=256))
    executable, buffers, workspace = prepared(PLAIN)
    x, y = buffers.args[0], buffers.results[0]
    with pytest.raises(LaunchError, match="x: strides"):
        executable.launch(
            Buffers((x.contiguous(memory_format=torch.channels_last),), [y], buffers.constants), workspace
        )
    shifted = torch.empty(y.numel() + 1)[1:].view(y.shape)
    with pytest.raises(LaunchError, match=r"y: its memory starts at .* no multiple of 16"):
        executable.launch(Buffers((x,), [shifted], buffers.constants), workspace)
    with pytest.raises(LaunchError, match="result 0: no tensor"):
        executable.launch(Buffers((x,), [None], buffers.constants), workspace)
    for small in (None, workspace[:255]):
        with pytest.raises(LaunchError, match="expected at least 256"):
            executable.launch(buffers, small)
    fake.fails = "CUDNN_STATUS_EXECUTION_FAILED"
    with pytest.raises(LaunchError, match="EXECUTION_FAILED"):
        executable.launch(buffers, workspace)


def test_packed_constants_are_aligned_detached_and_in_the_layout(install):
    install(plan(1))
    problem = replace(PLAIN, layout="nhwc", epilogue=FULL)
    executable = ENGINE.build(problem, ENGINE.space(problem, H100)[0], H100)
    weight = torch.nn.Parameter(torch.randn(problem.weight_spec.shape))
    bias = torch.randn(problem.k + 1)[1:]
    packed = executable.pack([weight, bias])
    assert packed[0].is_contiguous(memory_format=torch.channels_last)
    assert not any(t.requires_grad or t.data_ptr() % 16 for t in packed)
    assert torch.equal(packed[0], weight)
    assert torch.equal(packed[1], bias)
    aligned = torch.randn(problem.k)
    assert executable.pack([weight, aligned])[1].data_ptr() == aligned.data_ptr()


def test_a_handle_for_each_thread_on_torchs_stream(install):
    fake = install(plan(1))
    found = []

    def work():
        found.extend([library.handle(), library.handle()])

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert found == ["handle 0", "handle 0", "handle 1", "handle 1"]
    assert fake.streams == [(handle, 7) for handle in found]


def test_errors_are_caught_though_the_frontends_own_is_no_runtime_error(install):
    install()
    assert not issubclass(NotSupportedError, RuntimeError)
    assert NotSupportedError in library.errors()
    assert library.first_line(RuntimeError("\n  one \ntwo")) == "one"
    assert library.first_line(RuntimeError()) == "RuntimeError"
