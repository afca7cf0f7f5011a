"""Whole nets as one captured graph on a GPU: right, repeatable, safe with streams, threads and other programs."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.gpu

import convoy  # noqa: E402
from convoy.pipeline import optimize_model  # noqa: E402
from convoy.tune import local_search  # noqa: E402
from convoy.zoo import load_model  # noqa: E402


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("db") / "perf.db"


@pytest.fixture(scope="module", params=["fp16", "fp32"])
def tuned(request: pytest.FixtureRequest, database: Path):
    model = load_model("resnet18", dtype=request.param).cuda()
    x = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(1)).to("cuda", next(model.parameters()).dtype)
    few = ("triton.implicit_gemm", "triton.stem", "inductor")
    with pytest.MonkeyPatch.context() as patch:  # one setting of each engine: a compiler's seconds each
        patch.setattr(local_search, "QUICK_COMPILED_CONFIGS", 0)
        settings = convoy.Settings(db=database, only_engines=few, deterministic=True)
        result = optimize_model(model, (x,), name="resnet18", settings=settings)
    return model, x, result


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    limit = 2e-2 if found.dtype is torch.float16 else 5e-3
    return float((found.double() - wanted.double()).norm() / wanted.double().norm()) < limit


def test_right_and_one_graph(tuned) -> None:
    model, x, result = tuned
    assert not result.plan.baseline
    assert type(result.program.programs[0].runnable).__name__ == "CudaGraphProgram"
    with torch.no_grad():
        for seed in range(5):
            given = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(x)
            assert close(result.program(given), model(given))


def test_a_replay_has_the_bits_of_its_launches_one_by_one(tuned) -> None:
    _, x, result = tuned
    runnable = result.program.programs[0].runnable
    for seed in range(5):
        given = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(x)
        found = result.program(given)
        with torch.no_grad():
            (launched,) = runnable.eager(runnable.inputs)
        assert torch.equal(found, launched)


def test_ten_thousand_replays_with_changing_inputs_give_the_same_bits(tuned) -> None:
    _, x, result = tuned
    inputs = [torch.randn(x.shape, generator=torch.Generator().manual_seed(s)).to(x) for s in range(4)]
    wanted = [result.program(given) for given in inputs]
    for index in range(10_000):
        found = result.program(inputs[index % 4])
        if index % 97 == 0:
            assert torch.equal(found, wanted[index % 4])
    assert torch.equal(result.program(inputs[0]), wanted[0])


def test_outputs_belong_to_the_caller(tuned) -> None:
    _, x, result = tuned
    first = result.program(x)
    kept = first.clone()
    result.program(x + 1)
    torch.cuda.synchronize()
    assert torch.equal(first, kept)


def test_streams_and_threads(tuned) -> None:
    _, x, result = tuned
    inputs = [torch.randn(x.shape, generator=torch.Generator().manual_seed(s)).to(x) for s in range(4)]
    wanted = [result.program(given) for given in inputs]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def call(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(200):
                found = result.program(inputs[index])
                torch.cuda.current_stream().synchronize()
                if not torch.equal(found, wanted[index]):
                    wrong.append(index)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_saved_plan_replays_and_survives_torch_compiles_own_graphs(tuned, tmp_path: Path, database: Path) -> None:
    model, x, result = tuned
    path = tmp_path / "p.json"
    result.program.save(path)
    again = convoy.load(model, path, (x,), settings=convoy.Settings(db=database))
    with torch.no_grad():
        before = again(x)
        compiled = torch.compile(torch.nn.Linear(64, 64).cuda().to(x.dtype), mode="reduce-overhead")
        for _ in range(4):
            compiled(torch.zeros(4, 64, device="cuda", dtype=x.dtype))
        assert torch.equal(again(x), before)
        assert close(before, model(x))


def test_last_reads_of_large_values_are_marked_and_change_no_bit(database: Path) -> None:
    """Values of 25.7 MB: the depthwise convolutions read each for the last time."""
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(32, 32, 3, padding=1, groups=32) for _ in range(3)]
    model = torch.nn.Sequential(*layers).eval().to("cuda", torch.float16)
    x = torch.randn(32, 32, 112, 112, generator=torch.Generator().manual_seed(3)).to("cuda", torch.float16)
    fast = convoy.optimize(model, (x,), settings=convoy.Settings(db=database, deterministic=True, time_s=20))
    runnable = fast.programs[0].runnable
    assert runnable is not None, fast.plan.notes
    assert runnable.last_reads >= 2
    for _ in range(3):
        found = fast(x)
        with torch.no_grad():
            (launched,) = runnable.eager(runnable.inputs)
        assert torch.equal(found, launched)
    with torch.no_grad():
        assert close(found, model.double()(x.double()))
