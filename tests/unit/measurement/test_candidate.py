import gc
import weakref
from contextlib import suppress

import pytest
import torch

from convoy.engines.manifest import load_engine
from convoy.errors import CompileError
from convoy.measurement import data, output_buffers
from convoy.measurement.candidate import prepare
from convoy.measurement.data import make_data
from convoy.measurement.failure import (
    REASON_CHARACTERS,
    Failure,
    failure_of,
    first_lines,
    is_out_of_memory,
    run_or_fail,
)
from convoy.measurement.in_process import InProcessRunner
from convoy.measurement.oracle import oracle
from convoy.measurement.output_buffers import OutputBuffers
from convoy.measurement.protocol import MAX_COPIES, Protocol
from convoy.measurement.reference_data import ReferenceData, checked_images, data_key
from convoy.measurement.runner import Request
from convoy.perfdb.row import Status
from convoy.problem import (
    ConvProblem,
    EngineConfig,
    Epilogue,
    Knobs,
    LayoutProblem,
    LinearProblem,
    SubgraphProblem,
    TensorSpec,
)
from convoy.target import Target
from tests.unit.measurement import faulty_engines as engines

TARGET = Target("cpu", "test", "generic", 1, 1 << 34, 1 << 20)
PROBLEM = LinearProblem(4, 48, 32, epilogue=Epilogue(bias=True))


def prepared(cls, problem=PROBLEM):
    bench = ReferenceData(problem, TARGET)
    with torch.no_grad():
        return prepare(bench, EngineConfig(cls.id), engines.extra(cls))


@pytest.mark.parametrize("cls", [engines.Right, engines.Scratch, engines.Slow, engines.Chatty])
def test_right_candidates_can_be_launched(cls, capfd):
    ready = prepared(cls)
    ready.launch()
    assert 0 < ready.error < 1e-6
    assert ready.resident_bytes == 4 * (48 * 32 + 32)


@pytest.mark.parametrize(
    ("cls", "status", "reason"),
    [
        (engines.Wrong, Status.WRONG_RESULT, "on integer data"),
        (engines.Untouched, Status.WRONG_RESULT, "never written"),
        (engines.Overrun, Status.WRONG_RESULT, "wrote outside result 0"),
        (engines.OverrunScratch, Status.WRONG_RESULT, "wrote outside the workspace"),
        (engines.Scribbles, Status.WRONG_RESULT, "wrote to its args"),
        (engines.SpoilsWeights, Status.WRONG_RESULT, "wrote to its constants"),
        (engines.NoCompiler, Status.COMPILE_ERROR, "the compiler said no\nerror line 0"),
        (engines.BadBuild, Status.COMPILE_ERROR, "KeyError: 'block_m'"),
        (engines.Greedy, Status.OUT_OF_MEMORY, "a terabyte"),
        (engines.GreedyTorch, Status.OUT_OF_MEMORY, "memory"),
        (engines.Raises, Status.LAUNCH_ERROR, "ZeroDivisionError: by nought"),
        (engines.RaisesWhenAsked, Status.UNSUPPORTED, "no such field"),
    ],
)
def test_every_fault_has_its_status_and_reason(cls, status, reason):
    with pytest.raises(Failure) as caught:
        prepared(cls)
    assert caught.value.status is status
    assert reason in caught.value.reason


@pytest.mark.parametrize("cls", [engines.Scribbles, engines.SpoilsWeights, engines.SpoilsLater])
def test_who_spoils_the_data_spoils_it_for_nobody_else(cls):
    bench = ReferenceData(PROBLEM, TARGET)
    bench.fill()
    try:
        ready = prepare(bench, EngineConfig(cls.id), engines.extra(cls))
        for _ in range(3):
            ready.launch()
    except Failure as failure:
        assert failure.status is Status.WRONG_RESULT  # noqa: PT017
    assert prepare(bench, EngineConfig("right"), engines.extra(engines.Right)).error < 1e-6


def test_spoilt_data_is_not_handed_to_a_sibling():
    first = ReferenceData(CONV, TARGET)
    first.fill()
    first.of("normal")[0].args[0].mul_(2)
    second = ReferenceData(CONV.with_layout("nhwc"), TARGET, sibling=first)
    wanted = make_data(CONV, 20231, "normal", "cpu").args[0]
    assert torch.equal(second.of("normal")[0].args[0], wanted)


def test_a_candidate_of_another_version_is_not_tried():
    with pytest.raises(Failure, match="version 7 was asked for, 1 is here") as caught:
        prepare(ReferenceData(PROBLEM, TARGET), EngineConfig("right", 7), engines.extra(engines.Right))
    assert caught.value.status is Status.UNSUPPORTED


def test_unknown_and_unloadable_engines_are_rows_too():
    for config, extra in ((EngineConfig("nobody"), ()), (EngineConfig("x"), ("x=no_such_module:X",))):
        with pytest.raises(Failure, match="cannot be loaded") as caught:
            prepare(ReferenceData(PROBLEM, TARGET), config, extra)
        assert caught.value.status is Status.UNSUPPORTED


def test_long_logs_are_cut():
    failure = failure_of(CompileError("e", "short", "\n".join("x" * 500 for _ in range(1000))), Status.LAUNCH_ERROR)
    assert len(failure.reason) <= REASON_CHARACTERS
    assert failure.reason.startswith("short\nxxx")
    assert first_lines("\n\na\nb") == "a\nb"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error, expected):
    assert is_out_of_memory(error) is expected


# --- data and oracle ----------------------------------------------------------------------------------------------------

CONV = ConvProblem(2, 6, 9, 9, 5, 3, 3, 1, 1, epilogue=Epilogue(bias=True, activation="relu"))
SUBGRAPH = "graph 1\ninput %x: fp32[2,3,4,4]\n%y: fp32[2,3,4,4] = aten.relu.default(%x)\nreturn %y\n"


def same(a, b):
    return all(torch.equal(x, y) and x.stride() == y.stride() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("problem", "sibling", "shares_answers"),
    [
        (CONV, CONV.with_layout("nhwc"), True),
        (CONV.with_layout("nhwc"), CONV, True),
        (CONV, ConvProblem(2, 6, 9, 9, 5, 3, 3, 1, 1, layout="nhwc", epilogue=Epilogue(bias=True)), False),
        (LinearProblem(2, 8, 4), LinearProblem(2, 8, 4, epilogue=Epilogue(activation="relu")), False),
        (SubgraphProblem(SUBGRAPH), SubgraphProblem(SUBGRAPH, "nhwc"), True),
    ],
)
def test_shared_data_is_what_would_have_been_made(problem, sibling, shares_answers):
    first = ReferenceData(sibling, TARGET)
    first.fill()
    shared, fresh = ReferenceData(problem, TARGET, sibling=first), ReferenceData(problem, TARGET)
    for kind in ("integer", "normal"):
        (data, exact), (fresh_data, fresh_exact) = shared.of(kind), fresh.of(kind)
        assert same(data.args, fresh_data.args)
        assert same(data.constants, fresh_data.constants)
        for found, wanted in zip(exact, fresh_exact, strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0 if kind == "integer" else 1e-14)
        assert (exact is first.of(kind)[1]) is shares_answers


@pytest.mark.parametrize(
    "other",
    [
        ConvProblem(2, 6, 9, 9, 5, 3, 3, 1, 1),
        ConvProblem(2, 6, 9, 9, 5, 3, 3, 1, 0, epilogue=CONV.epilogue),
        LinearProblem(2, 6, 5),
        LayoutProblem(TensorSpec((2, 6, 9, 9), "fp32"), "nchw", "nhwc"),
    ],
)
def test_data_of_other_problems_is_not_shared(other):
    assert data_key(other) != data_key(CONV)
    first = ReferenceData(other, TARGET)
    first.fill()
    assert same(
        ReferenceData(CONV, TARGET, sibling=first).of("normal")[0].args, make_data(CONV, 20231, "normal", "cpu").args
    )


def test_of_a_large_batch_the_first_images_and_the_last_are_checked():
    large = ConvProblem(16, 64, 112, 112, 64, 3, 3, 1, 1)
    images = checked_images(large, "cpu")
    assert images[-1] == 15
    assert 2 <= len(images) < 16
    assert list(images[:-1]) == list(range(len(images) - 1))
    assert not checked_images(large, "cuda")
    assert not checked_images(CONV, "cpu")
    assert not checked_images(ConvProblem(16, 64, 112, 112, 64, 3, 3, 1, 1, direction="wgrad"), "cpu")


@pytest.mark.parametrize(("image", "caught"), [(0, True), (5, True), (3, False)])
def test_only_the_checked_images_are_compared(monkeypatch, image, caught):
    monkeypatch.setattr("convoy.measurement.reference_data.checked_images", lambda problem, device: (0, 5))

    class SpoilsOne(engines.Right):
        id = f"spoils_{image}"

        @staticmethod
        def body(run, buffers, workspace):
            engines.compute(run, buffers, workspace)
            buffers.results[0][image] += 1

    monkeypatch.setattr(engines, "SpoilsOne", SpoilsOne, raising=False)
    bench = ReferenceData(LinearProblem(6, 48, 32, epilogue=Epilogue(bias=True)), TARGET)
    extra = (f"spoils_{image}=tests.unit.measurement.faulty_engines:SpoilsOne",)
    if caught:
        with pytest.raises(Failure, match="on integer data"):
            prepare(bench, EngineConfig(f"spoils_{image}"), extra)
    else:
        assert prepare(bench, EngineConfig(f"spoils_{image}"), extra).error < 1e-6


def short_of_memory(monkeypatch, most: int) -> None:
    """An oracle that has room for so many images."""

    def limited(problem, data):
        if problem.n > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return oracle(problem, data)

    monkeypatch.setattr("convoy.measurement.reference_data.oracle", limited)


@pytest.mark.parametrize(("most", "images"), [(16, ()), (8, (*range(7), 15)), (3, (0, 15)), (2, (0, 15))])
def test_where_there_is_no_room_for_all_answers_fewer_images_are_checked(monkeypatch, most, images):
    short_of_memory(monkeypatch, most)
    problem = LinearProblem(16, 48, 32, epilogue=Epilogue(bias=True))
    bench = ReferenceData(problem, TARGET)
    bench.fill()
    assert bench.checked == images
    for kind in ("integer", "normal"):
        assert len(bench.of(kind)[1][0]) == (len(images) or 16)
    extra = engines.extra(engines.Right) + engines.extra(engines.Wrong)
    assert prepare(bench, EngineConfig("right"), extra).error < 1e-6
    with pytest.raises(Failure, match="on integer data"):
        prepare(bench, EngineConfig("wrong"), extra)
    twin = ReferenceData(problem, TARGET, sibling=bench)  # takes the answers, so it looks at the same images
    assert twin.checked == images
    assert prepare(twin, EngineConfig("right"), extra).error < 1e-6


@pytest.mark.parametrize(("most", "images"), [(16, ()), (8, (*range(7), 15)), (2, (0, 15)), (1, ())])
def test_where_a_launch_has_no_room_beside_the_answers_fewer_images_are_checked(monkeypatch, most, images):
    """A candidate that has none beside one image's answers either is itself too large: no other is checked less for it."""

    class Crowded(engines.Right):
        id = f"crowded_{most}"

        @staticmethod
        def body(run, buffers, workspace):
            if len(bench.of("integer")[1][0]) > most:
                raise torch.OutOfMemoryError("CUDA out of memory")
            engines.compute(run, buffers, workspace)

    monkeypatch.setattr(engines, "Crowded", Crowded, raising=False)
    bench = ReferenceData(LinearProblem(16, 48, 32, epilogue=Epilogue(bias=True)), TARGET)
    extra = engines.extra(Crowded) + engines.extra(engines.Right)
    if most > 1:
        assert prepare(bench, EngineConfig(Crowded.id), extra).error < 1e-6
    else:
        with pytest.raises(Failure, match="out of memory") as failed:
            prepare(bench, EngineConfig(Crowded.id), extra)
        assert failed.value.status is Status.OUT_OF_MEMORY
    assert bench.checked == images
    assert prepare(bench, EngineConfig("right"), extra).error < 1e-6
    assert len(bench.of("normal")[1][0]) == (len(images) or 16)


@pytest.mark.parametrize(
    "problem",
    [
        LinearProblem(16, 48, 32),  # not for two images
        LinearProblem(2, 48, 32),  # has no fewer
        ConvProblem(16, 4, 8, 8, 4, 3, 3, 1, 1, direction="wgrad"),  # sums over the images
    ],
)
def test_an_oracle_that_no_image_has_room_for_says_so(monkeypatch, problem):
    short_of_memory(monkeypatch, 1)
    with pytest.raises(torch.OutOfMemoryError):
        ReferenceData(problem, TARGET).fill()


def test_where_data_has_no_room_beside_what_can_be_made_anew_that_goes_first(monkeypatch):
    """Of a layer whose tensors take half of the memory, data of one kind is held at a time, and no other buffers beside it."""
    made, held = [], []

    def limited(problem, seed, kind, device):
        if bench.output_buffers.is_held or any(x() is not None for x in held):
            raise torch.OutOfMemoryError("CUDA out of memory")
        made.append(kind)
        found = make_data(problem, seed, kind, device)
        held.append(weakref.ref(found.args[0]))
        return found

    monkeypatch.setattr("convoy.measurement.reference_data.make_data", limited)
    bench = ReferenceData(PROBLEM, TARGET)
    bench.output_buffers.workspace(100)
    bench.fill()
    assert list(bench._data) == ["normal"]
    ready = prepare(bench, EngineConfig("scratch"), engines.extra(engines.Scratch))
    assert made == ["integer", "normal", "integer", "normal"]
    ready.launch()
    del ready  # which holds what it is timed on
    with pytest.raises(Failure, match="on integer data"):
        prepare(bench, EngineConfig("wrong"), engines.extra(engines.Wrong))


def test_data_that_has_no_room_at_all_is_out_of_memory(monkeypatch):
    monkeypatch.setattr(
        "convoy.measurement.reference_data.make_data", lambda *_: engines.GreedyTorch.body(None, None, None)
    )
    with pytest.raises(RuntimeError) as failed:
        ReferenceData(PROBLEM, TARGET).fill()
    assert is_out_of_memory(failed.value)


@pytest.mark.parametrize("kind", ["integer", "normal"])
@pytest.mark.parametrize(("direction", "drawn_whole"), [("fprop", 3), ("dgrad", 2), ("wgrad", 2)])
def test_large_tensors_are_drawn_in_their_own_dtype_and_are_as_good(monkeypatch, direction, drawn_whole, kind):
    """But for the weight of a forward pass, which is small beside them."""
    epilogue = Epilogue(bias=True, residual=True) if direction == "fprop" else Epilogue()
    problem = ConvProblem(
        2, 16, 40, 40, 8, 3, 3, 1, 1, layout="nhwc", x_dtype="fp16", weight_dtype="fp16", y_dtype="fp16",
        numerics="half", direction=direction, epilogue=epilogue,
    )  # fmt: skip
    small = make_data(problem, 1, kind)
    monkeypatch.setattr(data, "LARGE", 1)
    drawn = []
    for name in ("randn", "randint"):
        whole = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda *args, whole=whole, **named: drawn.append(named.get("dtype")) or whole(*args, **named)
        )
    large = make_data(problem, 1, kind)
    signs = 1 if kind == "integer" and direction != "fprop" else 0
    assert drawn.count(torch.half) == drawn_whole + signs
    for tensor, other in zip(large.args, small.args, strict=True):
        assert (tensor.dtype, tensor.shape, tensor.stride()) == (other.dtype, other.shape, other.stride())
        assert abs(float(tensor.double().std()) / float(other.double().std()) - 1) < 0.2
    (exact,) = oracle(problem, large)
    if kind == "integer":
        assert torch.equal(exact, exact.round())
        assert 0 < float(exact.abs().max()) <= 2**11
    elif direction != "dgrad":
        assert float(large.args[0].min()) == 0.0  # rectified


def test_what_a_failed_launch_had_allocated_is_free_at_once():
    held = []

    def launch():
        room = torch.empty(1 << 10)
        held.append(weakref.ref(room))
        raise torch.OutOfMemoryError(f"no room beside {room.numel()}")

    gc.collect()
    gc.disable()
    try:
        with suppress(Failure):
            run_or_fail(launch, "cpu")
        assert held[0]() is None
    finally:
        gc.enable()


def test_an_oracle_that_fails_otherwise_is_not_asked_again(monkeypatch):
    asked = []

    def broken(problem, data):
        asked.append(problem.n)
        raise RuntimeError("no such algorithm")

    monkeypatch.setattr("convoy.measurement.reference_data.oracle", broken)
    with pytest.raises(RuntimeError, match="no such algorithm"):
        ReferenceData(LinearProblem(16, 48, 32), TARGET).fill()
    assert asked == [16]


# --- what is timed ------------------------------------------------------------------------------------------------------


def test_workspaces_are_aligned():
    place = OutputBuffers(PROBLEM, "cpu")
    assert place.workspace(0) is None
    for size in (1, 100, 256, 5000, 300):
        space = place.workspace(size)
        assert space.dtype == torch.uint8
        assert space.numel() == size
        assert space.data_ptr() % 256 == 0
    assert place.workspace(300).data_ptr() == place.workspace(5000).data_ptr()


def test_a_launch_reads_no_problem(monkeypatch):
    """A piece's text takes 50 microseconds to be parsed, more than many a piece takes to run."""
    text = "graph 1\ninput %x: fp32[2,3,4,4]\n%y: fp32[2,3,4,4] = aten.relu.default(%x)\nreturn %y\n"
    ready = prepare(ReferenceData(SubgraphProblem(text), TARGET), load_engine("aten").config())
    ready.launch()
    for module in ("data", "output_buffers", "reference_data", "candidate"):
        for name in ("parse_graph", "result_specs", "tensor_specs"):
            monkeypatch.setattr(f"convoy.measurement.{module}.{name}", None, raising=False)
    ready.launch()


@pytest.mark.parametrize("fresh", [("cpu",), ()])
def test_where_buffers_stay_all_candidates_write_to_the_same(monkeypatch, fresh):
    """As on a GPU: two dozen that wait to be timed together would hold two dozen results."""
    monkeypatch.setattr(engines, "Recorder", Recorder, raising=False)
    monkeypatch.setattr(output_buffers, "ALLOCATING_DEVICES", fresh)
    bench = ReferenceData(PROBLEM, TARGET)
    extra = ("recorder=tests.unit.measurement.faulty_engines:Recorder",)
    first, second = (prepare(bench, EngineConfig("recorder", 1, knobs), extra) for knobs in (Knobs(), AS_THEY_ARE))
    Recorder.seen.clear()
    first.launch()
    second.launch()
    results = [result for _, result in Recorder.seen]  # held, so that no address is given twice
    assert (results[0].data_ptr() == results[1].data_ptr()) == (not fresh)


AS_THEY_ARE = Knobs.of(packs=False)


class Recorder(engines.Right):
    """Right, and notes the addresses of weights and results."""

    id = "recorder"
    seen: list = []  # noqa: RUF012

    def build(self, problem, knobs, target):
        def body(run, buffers, workspace):
            engines.compute(run, buffers, workspace)
            Recorder.seen.append((buffers.constants[0].data_ptr(), buffers.results[0]))

        run = engines._Run(problem, body)
        if knobs != AS_THEY_ARE:
            run.pack = lambda constants: tuple(t.clone() for t in constants)
        return run


@pytest.mark.parametrize(
    ("cache_bytes", "copies"), [(1 << 20, MAX_COPIES), (4 * (48 * 32 + 32), 3), (4 * (48 * 32 + 32) - 1, 1), (0, 1)]
)
def test_cold_launches_go_round_copies_that_exceed_the_cache(monkeypatch, cache_bytes, copies):
    monkeypatch.setattr(engines, "Recorder", Recorder, raising=False)
    target = Target("cpu", "test", "generic", 1, 1 << 34, cache_bytes)
    ready = prepare(
        ReferenceData(PROBLEM, target),
        EngineConfig("recorder"),
        ("recorder=tests.unit.measurement.faulty_engines:Recorder",),
    )
    assert ready.held_bytes(cold=False) == ready.resident_bytes
    ready.make_copies(whole=False)
    ready.make_copies(whole=False)
    assert ready.held_bytes(cold=False) == ready.held_bytes(cold=True) == ready.resident_bytes * copies
    Recorder.seen.clear()
    for _ in range(2 * copies):
        ready.launch()
    addresses = [weight for weight, _ in Recorder.seen]
    assert len(set(addresses)) == copies
    assert addresses[:copies] == addresses[copies:]
    ready.release_copies()
    assert ready.held_bytes(cold=False) == ready.resident_bytes


@pytest.mark.parametrize("clock", ["wall", "graph"])
@pytest.mark.parametrize("knobs", [Knobs(), AS_THEY_ARE], ids=["packed", "as they are"])
def test_constants_that_are_taken_as_they_are_come_from_memory_too(monkeypatch, knobs, clock):
    """By the clock on a GPU they do not yet; its rows say so by their version."""
    monkeypatch.setattr(engines, "Recorder", Recorder, raising=False)
    target = Target("cpu", "test", "generic", 1, 1 << 34, 1 << 20)
    extra = ("recorder=tests.unit.measurement.faulty_engines:Recorder",)
    ready = prepare(ReferenceData(PROBLEM, target), EngineConfig("recorder", 1, knobs), extra)
    ready.make_copies(whole=Protocol(clock).copies_whole)
    Recorder.seen.clear()
    for _ in range(MAX_COPIES):
        ready.launch()
    expected = 1 if knobs == AS_THEY_ARE and clock == "graph" else MAX_COPIES
    assert len({weight for weight, _ in Recorder.seen}) == expected


def test_the_runner_times_with_copies_of_all_constants_on_a_cpu(monkeypatch):
    monkeypatch.setattr(engines, "Recorder", Recorder, raising=False)
    target = Target("cpu", "test", "generic", 1, 1 << 34, 1 << 20)
    runner = InProcessRunner(target, extra_engines=("recorder=tests.unit.measurement.faulty_engines:Recorder",))
    request = Request(PROBLEM, (EngineConfig("recorder", 1, AS_THEY_ARE),), 3)
    Recorder.seen.clear()
    (row,) = runner.measure(request, Protocol("wall", min_sample_us=1))
    assert row.ok, row.reason
    assert len({weight for weight, _ in Recorder.seen}) > 3  # as many as launches were timed; it was one


def test_results_are_new_tensors_as_in_the_finished_program(monkeypatch):
    monkeypatch.setattr(engines, "Recorder", Recorder, raising=False)
    ready = prepare(
        ReferenceData(PROBLEM, TARGET),
        EngineConfig("recorder"),
        ("recorder=tests.unit.measurement.faulty_engines:Recorder",),
    )
    Recorder.seen.clear()
    ready.launch()
    ready.launch()
    (_, first), (_, second) = Recorder.seen
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first, second)
