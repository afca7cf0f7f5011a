"""Packages: the same bits as the program that was exported, in a process without the module."""

from __future__ import annotations

import threading
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import convoy
from convoy.engines.compilers import host_compiler
from convoy.engines.cpu.native_launch import KernelSource
from convoy.errors import InputError, PlanError
from convoy.package.kernels import compile_kernels, load_library
from convoy.package.write import _Contents
from convoy.pipeline.replay.load import load
from tests.unit.package.conftest import Block, Mixed, X, seeded, stock
from tests.unit.pipeline.untimed import plans_kept
from tests.unit.program.fast_net import always_kept

NONE = convoy.Settings(effort="none")
SCALE = torch.full((1, 8, 1, 1), 0.5)


def test_an_opened_package_gives_what_pytorch_gives(portable: Path) -> None:
    net = convoy.open(portable)
    torch.testing.assert_close(net(X).double(), stock(Block, X), rtol=1e-4, atol=1e-5)
    assert net.model == "block"
    assert [(one.name, str(one.spec), one.layout) for one in net.inputs] == [("x", "fp32[2,3,17,15]", "nchw")]
    assert [str(one.spec) for one in net.outputs] == ["fp32[2,7]"]


def test_the_code_of_the_package_and_code_built_anew_give_the_same_bits(portable: Path) -> None:
    own, built = convoy.open(portable, trust=True), convoy.open(portable)
    assert torch.equal(own(X), built(X))
    channels_last = X.contiguous(memory_format=torch.channels_last)
    assert torch.equal(own(channels_last), built(X))


def test_a_package_gives_the_bits_of_the_program_that_was_exported(tmp_path: Path) -> None:
    model = seeded(Block)
    with always_kept():
        fast = convoy.optimize(model, (X,), settings=NONE)
    assert not fast.plan.baseline
    path = convoy.export(fast, tmp_path / "net.convoy")
    assert torch.equal(convoy.open(path)(X), fast(X))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_package_of_another_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    model, x = seeded(Block).to(dtype), X.to(dtype)
    path = convoy.export(model, tmp_path / "net.convoy", (x,), settings=NONE)
    for trust in (False, True):
        torch.testing.assert_close(convoy.open(path, trust=trust)(x).double(), stock(Block, X), rtol=5e-2, atol=5e-2)


def test_functions_of_one_name_stay_apart_in_a_library(tmp_path: Path) -> None:
    """Two sources may name their functions alike, as those of `cpu.direct` and `cpu.direct_bf16` do."""
    contents, sources = _Contents(), []
    for factor in (2, 3):
        source = tmp_path / f"by{factor}.c"
        source.write_text(f"#include <stdint.h>\nint64_t NAME(int64_t x) {{ return {factor} * x; }}\n")
        sources.append(KernelSource((source,), ("-DNAME=convoy_times",), "test", "convoy_times"))
    assert [contents.kernel(source) for source in [*sources, sources[0]]] == [0, 1, 0]
    names = [kernel.function for kernel in contents.kernels]
    compiled = compile_kernels(contents.kernels)
    assert len(compiled.sources) == 3  # team.c too
    library = load_library(memoryview(compiled.code))
    assert [library[name](7) for name in names] == [14, 21]


def test_a_saved_plan_is_exported(tmp_path: Path) -> None:
    model = seeded(Block)
    with always_kept():
        convoy.optimize(model, (X,), settings=NONE).save(tmp_path / "plan.json")
    path = convoy.export(model, tmp_path / "net.convoy", (X,), plan=tmp_path / "plan.json")
    assert torch.equal(convoy.open(path)(X), load(model, tmp_path / "plan.json", (X,))(X))


class Head(nn.Module):
    """A linear layer behind one of norm: in PyTorch's own operators, MKL's sums depend on the weight's address."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(20), nn.Linear(20, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, 20] to [n, 7]."""
        return self.head(self.norm(x))


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_bits_do_not_depend_on_where_a_weight_lies(tmp_path: Path, offset: int, transposed: bool) -> None:
    model, x = seeded(Head), torch.randn(1, 20, generator=torch.Generator().manual_seed(1))
    shape = (20, 7) if transposed else (7, 20)
    place = torch.zeros(140 + offset)[offset:].view(shape)
    place = place.t() if transposed else place
    model.head.weight = nn.Parameter(place.copy_(model.head.weight.detach()))
    path = convoy.export(model, tmp_path / "net.convoy", (x,), settings=NONE)
    net = convoy.open(path)
    assert torch.allclose(net(x), model(x), atol=1e-6)
    constants = [one for step in net.programs[0].runnable.bound.steps for one in step.constants]
    assert all(one.data_ptr() % 64 == 0 for one in constants)


def test_opening_captures_nothing_and_with_trust_compiles_nothing(
    portable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = convoy.open(portable)(X)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("not needed to open a package")

    monkeypatch.setattr(torch.export, "export", refuse)
    monkeypatch.setattr(host_compiler, "_compiled", refuse)
    assert torch.equal(convoy.open(portable, trust=True)(X), expected)


def test_layers_of_pytorch_and_nested_results_are_packaged(tmp_path: Path) -> None:
    model, scale = seeded(Mixed), torch.full((1, 8, 1, 1), 0.5)
    path = convoy.export(model, tmp_path / "mixed.convoy", (X, scale), settings=NONE)
    found = convoy.open(path)(X, scale)
    expected = stock(Mixed, X, scale)
    assert isinstance(expected, dict)
    assert found.keys() == expected.keys()
    assert type(found["rest"]) is tuple
    assert found["rest"][1] == 3
    torch.testing.assert_close(found["map"].double(), expected["map"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["rest"][0].double(), expected["rest"][0], rtol=1e-4, atol=1e-4)


def test_layers_without_c_kernels_are_named(tmp_path: Path) -> None:
    scale = torch.full((1, 8, 1, 1), 0.5)
    with pytest.raises(convoy.InputError, match=r"portable: .*tanh.*cumsum"):
        convoy.export(seeded(Mixed), tmp_path / "no.convoy", (X, scale), portable=True, settings=NONE)
    assert not list(tmp_path.iterdir())


def test_several_shapes_share_their_weights(tmp_path: Path) -> None:
    model, one = seeded(Block), X[:1]
    with always_kept():
        fast = convoy.optimize(model, (X,), settings=convoy.Settings(effort="none", only_engines=("cpu.direct",)))
        alone = convoy.export(fast, tmp_path / "one.convoy").stat().st_size
        fast.tune((one,))
    path = convoy.export(fast, tmp_path / "two.convoy")
    net = convoy.open(path)
    assert torch.equal(net(X), fast(X))
    assert torch.equal(net(one), fast(one))
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(tmp_path / "one.convoy") as other:
        sizes = archive.getinfo("weights.safetensors").file_size, other.getinfo("weights.safetensors").file_size
    assert sizes[0] < 1.2 * sizes[1]
    assert path.stat().st_size > alone
    with pytest.raises(convoy.InputError, match="shapes that were exported"):
        net(X[:, :, :8])


def test_each_shape_of_an_optimised_module_has_its_own_plan(tmp_path: Path) -> None:
    model, one, other = seeded(Block), X[:1], X[:, :, :9]
    with always_kept():
        fast = convoy.optimize(model, (X,), settings=convoy.Settings(effort="none", only_engines=("cpu.direct",)))
        fast.tune((one,))
        path = convoy.export(fast, tmp_path / "net.convoy", (one,), more_args=[(X,), (other,)], settings=NONE)
    net = convoy.open(path)
    assert [program.plan for program in net.programs[:2]] == fast.plans[::-1]
    assert [net(x).shape for x in (one, X, other)] == [(1, 7), (2, 7), (2, 7)]
    assert torch.equal(net(X), fast(X))
    assert torch.equal(net(one), fast(one))
    assert len(fast.plans) == 2


def test_a_call_with_other_arguments_is_refused(portable: Path) -> None:
    net = convoy.open(portable)
    for args in ((X[:1],), (X.double(),), (X, X), ("x",), ()):
        with pytest.raises(convoy.InputError):
            net(*args)
    net(X.clone().requires_grad_())


def test_several_threads_share_a_package(portable: Path) -> None:
    net = convoy.open(portable, trust=True)
    inputs = [torch.randn(2, 3, 17, 15, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    expected = [net(x) for x in inputs]
    wrong: list[int] = []

    def run(index: int) -> None:
        wrong.extend(index for _ in range(20) if not torch.equal(net(inputs[index]), expected[index]))

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_the_weights_are_used_where_they_lie(portable: Path) -> None:
    net = convoy.open(portable, trust=True)
    runnable = net.programs[0].runnable
    held = {id(t.untyped_storage()) for s in runnable.bound.steps for t in s.constants if isinstance(t, torch.Tensor)}  # type: ignore[union-attr]
    pointers = [t.data_ptr() for s in runnable.bound.steps for t in s.constants if isinstance(t, torch.Tensor)]  # type: ignore[union-attr]
    assert held
    size = portable.stat().st_size
    assert max(pointers) - min(pointers) < size
    large = [
        t for s in runnable.bound.steps for t in s.constants if isinstance(t, torch.Tensor) and t.numel() % 16 == 0
    ]  # type: ignore[union-attr]
    assert all(t.data_ptr() % 64 == 0 for t in large)


class Splits(nn.Module):
    """Chooses by its data, so that it cannot be captured as one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.backbone(x)
        return self.head((y * 2 if float(y.sum()) > 1e9 else y).mean((2, 3)))


@pytest.mark.filterwarnings("ignore:convoy:UserWarning")
def test_a_model_of_several_graphs_is_refused_without_a_word_of_a_plan_that_nobody_gave(tmp_path: Path) -> None:
    model, x = Splits().eval(), torch.randn(1, 3, 8, 8)
    settings = convoy.Settings(effort="none", db=tmp_path / "perf.db")
    with plans_kept(), pytest.warns(UserWarning, match="optimized by parts"):
        fast = convoy.optimize(model, (x,), settings=settings)
    for given, args in ((fast, None), (fast, (x,)), (model, (x,))):
        with pytest.raises(InputError, match=r"(?s)^model: .*one graph.*convoy\.export\(model\.") as caught:
            convoy.export(given, tmp_path / "net.convoy", args, settings=settings)
        assert "cannot be exported" in str(caught.value)
        assert "plan" not in str(caught.value)
    fast.save(tmp_path / "net.plan.json")
    with pytest.raises(PlanError, match=r"^plan: "):
        convoy.export(model, tmp_path / "net.convoy", (x,), plan=tmp_path / "net.plan.json", settings=settings)
    convoy.export(fast.backbone, tmp_path / "backbone.convoy", (x,), settings=settings)
    torch.testing.assert_close(convoy.open(tmp_path / "backbone.convoy")(x), model.backbone(x).detach())


def test_a_module_without_plan_needs_arguments(tmp_path: Path) -> None:
    with pytest.raises(convoy.InputError, match="args"):
        convoy.export(nn.Conv2d(3, 4, 3).eval(), tmp_path / "net.convoy")


@pytest.mark.parametrize("exported", [((X, SCALE), {}), ((X,), {"scale": SCALE}), ((), {"scale": SCALE, "x": X})])
def test_inputs_by_position_and_by_name_are_one_call(
    exported: tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    model, (args, kwargs) = seeded(Mixed), exported
    convoy.export(model, tmp_path / "mixed.convoy", args, kwargs, settings=NONE)
    net = convoy.open(tmp_path / "mixed.convoy")
    with torch.no_grad():
        wanted = model(X, SCALE)["map"]
    for given, named in (((X, SCALE), {}), ((X,), {"scale": SCALE}), ((), {"scale": SCALE, "x": X})):
        torch.testing.assert_close(net(*given, **named)["map"], wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(convoy.InputError):
        net(X, gain=SCALE)
