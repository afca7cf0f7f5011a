"""Packages on a real GPU: the bits of the program, in Python and in C, several shapes and streams, and refusals in words."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import convoy
from convoy.errors import InputError, PackageError
from convoy.package.cuda.recorded_graph import CudnnRun
from convoy.package.runtime_library import write_runtime
from convoy.zoo import load_model
from tests.unit.package.example_programs import EXAMPLES, built, said
from tests.unit.package.libconvoy import Libconvoy, tensors

pytestmark = pytest.mark.gpu

DTYPE = torch.float16


class Net(nn.Module):
    """A first layer, a residual, a pooling, a norm, a branch and a head, with two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(64)
        self.first, self.second = nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)
        self.left, self.right = nn.Conv2d(64, 64, 1), nn.Conv2d(64, 128, 3, stride=2, padding=1)
        self.head = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """[n, 3, h, w] to a map and scores."""
        x = nn.functional.max_pool2d(torch.relu(self.norm(self.stem(x))), 3, 2, 1)
        x = torch.relu(self.second(torch.relu(self.first(x))) + x)
        return {"map": self.left(x), "scores": self.head(torch.relu(self.right(x)).mean((2, 3)))}


def image(batch: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(batch, 3, 64, 64, generator=torch.Generator().manual_seed(seed)).to("cuda", DTYPE)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval().to("cuda", DTYPE)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> convoy.Settings:
    return convoy.Settings(time_s=40, db=tmp_path_factory.mktemp("db") / "perf.db")


@pytest.fixture(scope="module")
def package(model: nn.Module, settings: convoy.Settings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("package") / "net.convoy"
    return convoy.export(model, path, (image(),), more_args=[(image(4),)], settings=settings)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Libconvoy:
    return Libconvoy(write_runtime(tmp_path_factory.mktemp("runtime")))


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def test_its_outputs_are_as_near_to_float64_as_pytorchs(model: nn.Module, package: Path) -> None:
    net = convoy.open(package, trust=True)
    assert net.device == torch.device("cuda", 0)
    assert net.batch_sizes == (1, 4)
    with torch.no_grad():
        double = Net().eval().cuda().double()
        double.load_state_dict(model.state_dict())
        for batch in (1, 4, 1):
            x = image(batch, seed=batch)
            found, stock, exact = net(x), model(x), double(x.double())
            for name, wanted in exact.items():
                assert found[name].shape == wanted.shape
                assert error(found[name], wanted) <= 1.5 * error(stock[name], wanted) + 1e-4


def test_weights_are_there_once(package: Path) -> None:
    net = convoy.open(package, trust=True)
    one, four = net.packed
    shared = {block.constant for block in one.blocks} & {block.constant for block in four.blocks} - {""}
    assert shared
    addresses = [
        {block.data_ptr() for block in program.runnable._blocks}  # type: ignore[union-attr]
        for program in net.programs
    ]
    assert len(addresses[0] & addresses[1]) == len(shared)


def test_a_fresh_process_gives_the_same_bits(package: Path, tmp_path: Path) -> None:
    expected = convoy.open(package, trust=True)(image(4))
    torch.save({"x": image(4), "y": expected}, tmp_path / "expected.pt")
    code = (
        "import sys, torch, convoy\n"
        "kept = torch.load(sys.argv[2], weights_only=True)\n"
        "y = convoy.open(sys.argv[1], trust=True)(kept['x'])\n"
        "print(all(torch.equal(y[name], kept['y'][name]) for name in y))\n"
        "print('triton' in sys.modules, 'torch._inductor' in sys.modules)\n"
    )
    command = [sys.executable, "-c", code, str(package), str(tmp_path / "expected.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout.split() == ["True", "False", "False"], done.stderr[-2000:]


def test_the_c_runtime_gives_the_same_bits(package: Path, library: Libconvoy) -> None:
    net = convoy.open(package, trust=True)
    with library.opened(package) as opened:
        assert opened.library.convoy_net_device(opened.handle) == 1
        for batch in (4, 1):
            x = image(batch, seed=7)
            expected = net(x)
            made = [torch.full_like(y, float("nan"), device="cpu").contiguous() for y in expected.values()]
            assert opened.run([x.cpu()], made) == 0, library.error()
            for (name, wanted), one in zip(expected.items(), made, strict=True):
                info = [opened.info("output", i, program=0 if batch == 1 else 1) for i in range(2)]
                layout = info[list(expected).index(name)][2]
                values = wanted.permute(0, 2, 3, 1) if layout == 1 else wanted
                assert torch.equal(one.flatten(), values.contiguous().flatten().cpu()), name


def test_the_examples_in_c_and_cpp(library: Libconvoy, settings: convoy.Settings, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 32, 1), nn.Flatten(), nn.Linear(2048, 10)
    )
    # Divided on the CPU, as the example does: on a GPU PyTorch multiplies by the number's reciprocal, which rounds otherwise.
    x = (torch.arange(2 * 3 * 8 * 8) % 1000 / 1000).view(2, 3, 8, 8).cuda()
    path = convoy.export(net.eval().cuda(), tmp_path / "net.convoy", (x,), settings=settings, portable=True)
    y = convoy.open(path, trust=True)(x).flatten()
    found = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}  # where the driver may lie
    program = built(EXAMPLES / "classify.c", "cc", ("-std=c11",), library, tmp_path)
    code, text = said(program, path, **found)
    assert code == 0, text
    assert text.endswith(f": largest value {y.max():.9g} at {int(y.argmax())}\n")
    program = built(EXAMPLES / "throughput.cpp", "c++", ("-std=c++17",), library, tmp_path)
    code, text = said(program, path, 3, 20, **found)
    assert code == 0, text
    assert "3 threads, 60 calls" in text


def test_the_c_runtime_on_a_stream(package: Path, library: Libconvoy) -> None:
    """Tensors on the device, work queued on PyTorch's streams, many calls without a wait between them."""
    net = convoy.open(package, trust=True)
    xs = [image(1, seed=seed) for seed in range(20)]
    wanted = [net(x)["scores"] for x in xs]
    with library.opened(package) as opened:
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        torch.cuda.synchronize()
        kept = []
        for index, x in enumerate(xs):
            stream = streams[index % 2]
            with torch.cuda.stream(stream):
                made = [torch.empty_like(y) for y in net(x).values()]
                stream.synchronize()
            handle = ctypes.c_void_p(stream.cuda_stream)
            status = library.library.convoy_run_on_stream(
                opened.handle, tensors([x]), ctypes.c_size_t(1), tensors(made), ctypes.c_size_t(2), handle
            )
            assert status == 0, library.error()
            kept.append(made)
        torch.cuda.synchronize()
    for made, right in zip(kept, wanted, strict=True):
        assert torch.equal(made[1], right)


def test_threads_and_streams_give_the_same_bits(package: Path) -> None:
    net = convoy.open(package, trust=True)
    xs = [image(1, seed=seed) for seed in range(4)]
    wanted = [net(x)["map"] for x in xs]
    wrong: list[int] = []

    def run(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(200):
                y = net(xs[index])["map"]
            torch.cuda.current_stream().synchronize()
            if not torch.equal(y, wanted[index]):
                wrong.append(index)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_another_devices_package_and_another_driver_are_refused(
    package: Path, library: Libconvoy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: nn.Module
) -> None:
    with pytest.raises(PackageError, match="trust"):
        convoy.open(package)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 6))
    with pytest.raises(PackageError, match=r"capability 9\.0, this GPU has 8\.6"):
        convoy.open(package, trust=True)
    monkeypatch.undo()
    with pytest.raises(InputError, match="tensors on cuda:0"):
        convoy.open(package, trust=True)(image().cpu())
    cut = tmp_path / "cut.convoy"
    cut.write_bytes(package.read_bytes()[:-100])
    with pytest.raises(PackageError):
        convoy.open(cut, trust=True)
    assert library.status(cut) != 0


@pytest.fixture(scope="module")
def by_cudnn(settings: convoy.Settings, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A package whose convolutions are all plans of cuDNN's, for one image and for four, and an input."""
    torch.manual_seed(0)
    first, second = nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 128, 3, stride=2, padding=1)
    net = nn.Sequential(first, nn.ReLU(), second, nn.ReLU()).eval().to("cuda", DTYPE)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, 64, 56, 56, generator=generator).to("cuda", DTYPE, memory_format=torch.channels_last)
    only = dataclasses.replace(settings, only_engines=("cudnn", "cuda.layout", "cuda.fusion"))
    path = tmp_path_factory.mktemp("package") / "cudnn.convoy"
    return convoy.export(net, path, (x[:1],), more_args=[(x,)], settings=only), x


def test_plans_of_cudnn_run_in_python_and_in_c(by_cudnn: tuple[Path, torch.Tensor], library: Libconvoy) -> None:
    path, x = by_cudnn
    net = convoy.open(path, trust=True)
    for program in net.packed:
        assert sum(isinstance(node, CudnnRun) for node in program.nodes) == 2
    wanted = net(x)
    for _ in range(100):
        assert torch.equal(net(x), wanted)
    with library.opened(path) as opened:
        made = torch.full_like(wanted, float("nan"), device="cpu").contiguous()
        assert opened.run([x.cpu()], [made]) == 0, library.error()
        assert torch.equal(made.flatten(), wanted.permute(0, 2, 3, 1).flatten().cpu())


def test_plans_of_cudnn_run_in_fresh_processes(
    by_cudnn: tuple[Path, torch.Tensor], library: Libconvoy, tmp_path: Path
) -> None:
    """One with PyTorch, without the frontend; one in C, which finds cuDNN where PyTorch has it."""
    path, x = by_cudnn
    torch.save({"x": x, "y": convoy.open(path, trust=True)(x)}, tmp_path / "expected.pt")
    code = (
        "import sys, torch, convoy\n"
        "kept = torch.load(sys.argv[2], weights_only=True)\n"
        "y = convoy.open(sys.argv[1], trust=True)(kept['x'])\n"
        "print(torch.equal(y, kept['y']), 'cudnn' in sys.modules, 'triton' in sys.modules)\n"
    )
    command = [sys.executable, "-c", code, str(path), str(tmp_path / "expected.pt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout.split() == ["True", "False", "False"], done.stderr[-2000:]
    maps = Path("/proc/self/maps").read_text().splitlines()
    folder = next(str(Path(line.split()[-1]).parent) for line in maps if "libcudnn.so.9" in line)
    folders = os.pathsep.join([folder, os.environ.get("LD_LIBRARY_PATH", "")])
    program = built(EXAMPLES / "throughput.cpp", "c++", ("-std=c++17",), library, tmp_path)
    status, text = said(program, path, 1, 20, LD_LIBRARY_PATH=folders)
    assert status == 0, text


def test_a_portable_package_has_no_plan_of_cudnn(
    by_cudnn: tuple[Path, torch.Tensor], settings: convoy.Settings, tmp_path: Path
) -> None:
    _, x = by_cudnn
    net = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()).eval().to("cuda", DTYPE)
    opened = convoy.open(
        convoy.export(net, tmp_path / "own.convoy", (x,), settings=settings, portable=True), trust=True
    )
    assert not any(isinstance(node, CudnnRun) for node in opened.packed[0].nodes)


def test_a_plan_with_a_librarys_kernels_is_refused(model: nn.Module, tmp_path: Path) -> None:
    settings = convoy.Settings(effort="quick", only_engines=("cudnn",), db=tmp_path / "perf.db", time_s=20)
    fast = convoy.optimize(model, (image(),), settings=settings)
    path = tmp_path / "net.convoy"
    with pytest.raises(InputError, match=r"launches of Convoy's own kernels"):
        convoy.export(fast, path)
    assert not path.exists()
    assert convoy.export(
        fast, path, portable=True, settings=convoy.Settings(time_s=20, db=tmp_path / "perf.db")
    ).exists()


@pytest.mark.parametrize("name", ["mobilenet_v2", "googlenet"])
def test_nets_of_the_zoo(name: str, settings: convoy.Settings, tmp_path: Path) -> None:
    """Depthwise layers; branches, on several streams where the plan has them."""
    net = load_model(name).eval().to("cuda", DTYPE)
    x = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(1)).to("cuda", DTYPE)
    opened = convoy.open(convoy.export(net, tmp_path / "net.convoy", (x,), settings=settings), trust=True)
    with torch.no_grad():
        stock, found = net(x), opened(x)
        exact = net.double()(x.double())
    assert error(found, exact) <= 1.5 * error(stock, exact) + 1e-4


def test_the_command_line(tmp_path: Path, settings: convoy.Settings) -> None:
    """`convoy export` and `convoy run`, in processes of their own."""
    made, weights = str(tmp_path / "gpu.convoy"), str(tmp_path / "net.safetensors")
    save_file(load_model("resnet18").state_dict(), weights)
    tuned = ["--size", "64", "--time", "20", "--db", str(settings.db)]
    export = ["export", "resnet18", "--device", "cuda", "--dtype", "fp16", "--weights", weights, "-o", made, *tuned]
    said = ""
    for words in (export, ["run", made, "--trust"]):
        done = subprocess.run(
            [sys.executable, "-m", "convoy", *words], capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        said = done.stdout
    assert "largest output" in said
