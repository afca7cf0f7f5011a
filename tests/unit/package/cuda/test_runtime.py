"""libconvoy and packages for a GPU, with a fake CUDA driver: outputs, errors as codes with texts, and nothing left over."""

from __future__ import annotations

import _ctypes
import ctypes
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from convoy.engines.compilers.host_compiler import compiler_support
from convoy.package.runtime_library import write_runtime
from tests.unit.package import libconvoy as codes
from tests.unit.package.cuda.recorded import Scaled, ScaledByCudnn, compiled_fake, compiled_fake_cudnn, write
from tests.unit.package.libconvoy import Libconvoy, tensors

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(5))
NO_GPU, GPU_FAILED, OUT_OF_MEMORY = 9, 10, 8

pytestmark = pytest.mark.skipif(not compiler_support(), reason="needs a C compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Libconvoy:
    return Libconvoy(write_runtime(tmp_path_factory.mktemp("runtime")))


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("package") / "net.convoy", count=2)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    """The loader finds a library that is loaded by its own name, so that libconvoy opens this one."""
    fake = ctypes.CDLL(str(compiled_fake(tmp_path_factory.mktemp("driver"))))
    fake.fake_cuda_device.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_uint64]
    yield fake
    _ctypes.dlclose(fake._handle)


@pytest.fixture
def fake(loaded: ctypes.CDLL) -> Iterator[ctypes.CDLL]:
    loaded.fake_cuda_device(9, 0, 13000, 1 << 40)
    yield loaded
    assert loaded.fake_cuda_alive() == 0
    assert loaded.fake_cuda_depth() == 0


def test_it_gives_the_outputs_of_the_module(library: Libconvoy, package: Path, fake: ctypes.CDLL) -> None:
    with library.opened(package) as net:
        assert net.library.convoy_net_device(net.handle) == 1
        assert net.info("input", 0, program=1)[1:] == ((4, 8), 0, 128)
        for scale in (1.0, -3.0):
            y = torch.full((4, 8), float("nan"))
            assert net.run([scale * X], [y]) == 0, library.error()
            assert torch.equal(y, Scaled()(scale * X))


def test_tensors_on_the_device_and_a_stream(library: Libconvoy, package: Path, fake: ctypes.CDLL) -> None:
    addresses = [ctypes.c_uint64(), ctypes.c_uint64()]
    with library.opened(package) as net:
        context = ctypes.c_void_p()
        fake.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
        fake.cuCtxPushCurrent_v2(context)
        for address in addresses:
            assert fake.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(128)) == 0
        ctypes.memmove(addresses[0].value or 0, X.data_ptr(), 128)
        given, made = tensors([X]), tensors([X])
        given[0].data, made[0].data = addresses[0].value, addresses[1].value
        one = ctypes.c_size_t(1)
        for _ in range(2):
            assert library.library.convoy_run_on_stream(net.handle, given, one, made, one, ctypes.c_void_p(1)) == 0
        assert bytes(ctypes.string_at(addresses[1].value or 0, 128)) == Scaled()(X).numpy().tobytes()
        made[0].data = X.data_ptr()  # memory of the host
        assert library.library.convoy_run_on_stream(net.handle, given, one, made, one, None) == GPU_FAILED
        assert "refused a copy of an output: CUDA_ERROR_INVALID_VALUE" in library.error()
        for address in addresses:
            fake.cuMemFree_v2(address)
        fake.cuCtxPopCurrent_v2(ctypes.byref(context))
        fake.cuDevicePrimaryCtxRelease_v2(0)


def test_wrong_tensors_are_refused_and_the_net_goes_on(library: Libconvoy, package: Path, fake: ctypes.CDLL) -> None:
    y = torch.empty(4, 8)
    with library.opened(package) as net:
        assert net.run([X[:2].contiguous()], [y]) == codes.INVALID_ARGUMENT
        assert net.run([X.half()], [y]) == codes.INVALID_ARGUMENT
        assert net.run([X], []) == codes.INVALID_ARGUMENT
        assert net.run([X], [y]) == 0
    assert torch.equal(y, Scaled()(X))


def test_another_device_is_refused(library: Libconvoy, package: Path, fake: ctypes.CDLL) -> None:
    fake.fake_cuda_device(8, 6, 13000, 1 << 40)
    assert library.status(package) == codes.OTHER_MACHINE
    assert "made for a GPU of capability 9.0, this one has 8.6" in library.error()
    fake.fake_cuda_device(9, 0, 11080, 1 << 40)
    assert library.status(package) == codes.OTHER_MACHINE
    assert "this one is for 11" in library.error()
    assert library.status(package, flags=0) == codes.NOT_TRUSTED


def test_no_memory_is_said(library: Libconvoy, package: Path, fake: ctypes.CDLL) -> None:
    fake.fake_cuda_device(9, 0, 13000, 300)
    assert library.status(package) == OUT_OF_MEMORY
    assert "CUDA_ERROR_OUT_OF_MEMORY" in library.error()


@pytest.mark.parametrize(
    "name",
    [
        "cuInit", "cuDevicePrimaryCtxRetain", "cuDriverGetVersion", "cuModuleLoadData", "cuModuleGetFunction", "cuMemAlloc_v2",
        "cuMemcpyHtoDAsync_v2", "cuStreamCreate", "cuEventCreate", "cuGraphCreate", "cuGraphAddKernelNode_v2",
        "cuGraphAddMemcpyNode", "cuGraphAddMemsetNode", "cuGraphAddEmptyNode", "cuGraphAddDependencies_v2",
        "cuGraphKernelNodeSetAttribute", "cuGraphInstantiateWithFlags", "cuTensorMapReplaceAddress", "cuFuncSetAttribute",
    ],
)  # fmt: skip
def test_a_driver_that_fails_at_opening_leaves_nothing(
    library: Libconvoy, package: Path, fake: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("FAKE_CUDA_FAIL", name)
    assert library.status(package) == (NO_GPU if name == "cuInit" else GPU_FAILED)
    assert str(package) in library.error()


@pytest.mark.parametrize("name", ["cuGraphLaunch", "cuMemcpyDtoHAsync_v2", "cuStreamSynchronize", "cuStreamWaitEvent"])
def test_a_run_that_fails_does_not_end_the_net(
    library: Libconvoy, package: Path, fake: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    y = torch.empty(4, 8)
    with library.opened(package) as net:
        assert net.run([X], [y]) == 0
        monkeypatch.setenv("FAKE_CUDA_FAIL", name)
        assert net.run([X], [y]) == GPU_FAILED
        monkeypatch.delenv("FAKE_CUDA_FAIL")
        y.zero_()
        assert net.run([X], [y]) == 0
    assert torch.equal(y, Scaled()(X))


def test_damaged_programs_are_refused(
    library: Libconvoy, package: Path, fake: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each value of the program in turn becomes another one; sums are made right again, as an attacker would."""
    from convoy.package.cuda import cuda_contents

    with zipfile.ZipFile(package) as archive:
        data = json.loads(archive.read("programs/p0.json"))
    wrong = [
        ("nodes", 3, "kernel", 2), ("nodes", 3, "grid", [1, 1]), ("nodes", 3, "arguments", [["00", [[0, 0, 0]], 0]]),
        ("nodes", 3, "arguments", [["00000000000000", [[0, 0, 0]], 0]]), ("nodes", 3, "arguments", [[1, [], 0]]),
        ("nodes", 3, "arguments", [["0" * 16, [[0, 0, 128]], 0]]), ("nodes", 3, "arguments", [["xx", [], 0]]),
        ("nodes", 4, "arguments", [["00" * 128, [], 1]]), ("nodes", 1, "size_bytes", 200), ("nodes", 0, "count", 33),
        ("nodes", 0, "element_bytes", 3), ("nodes", 0, "kind", "exec"), ("edges", 0, 1, 99), ("edges", 0, 2, 7),
        ("blocks", 0, "size_bytes", 0), ("blocks", 3, "constant", "t9"), ("blocks", 3, "size_bytes", 33),
        ("places", 1, 1, 65), ("inputs", 0, "shape", [4, 9]),
    ]  # fmt: skip
    for member, index, field, value in wrong:
        changed = json.loads(json.dumps(data))
        changed[member][index][field] = value
        content = json.dumps(changed).encode()
        monkeypatch.setattr(cuda_contents, "graph_bytes", lambda graph, content=content: content)
        path = write(tmp_path / "wrong.convoy")
        assert library.status(path) == codes.DAMAGED, (member, index, field, value)


@pytest.fixture(scope="module")
def with_cudnn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package with a plan of cuDNN 9.19."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("convoy.package.cuda.cuda_contents.cudnn_version", lambda: 91900)
        return write(tmp_path_factory.mktemp("package") / "cudnn.convoy", count=2, cudnn=True)


@pytest.fixture
def cudnn(loaded: ctypes.CDLL, fake: ctypes.CDLL) -> Iterator[ctypes.CDLL]:
    made = ctypes.CDLL(str(compiled_fake_cudnn(Path(str(loaded._name)).parent)))
    made.fake_cudnn_version(91900)
    yield made
    assert made.fake_cudnn_alive() == 0


def test_a_plan_of_cudnn_runs(library: Libconvoy, with_cudnn: Path, cudnn: ctypes.CDLL) -> None:
    cudnn.fake_cudnn_version(91902)  # another patch of the same version
    with library.opened(with_cudnn) as net:
        assert cudnn.fake_cudnn_alive() == 2  # a handle, and the plan once
        for scale in (1.0, -3.0):
            y = torch.full((4, 8), float("nan"))
            assert net.run([scale * X], [y]) == 0, library.error()
            assert torch.equal(y, ScaledByCudnn()(scale * X))


def test_another_cudnn_is_refused(library: Libconvoy, with_cudnn: Path, cudnn: ctypes.CDLL) -> None:
    cudnn.fake_cudnn_version(92000)
    assert library.status(with_cudnn) == codes.OTHER_MACHINE
    assert "it has plans of cuDNN 9.19, this one is 9.20" in library.error()


@pytest.mark.parametrize(
    "name", ["cudnnCreate", "cudnnSetStream", "cudnnBackendFinalize", "cudnnBackendExecute", "cuStreamBeginCapture_v2",
             "cuStreamEndCapture", "cuGraphAddChildGraphNode"],
)  # fmt: skip
def test_a_cudnn_that_fails_at_opening_leaves_nothing(
    library: Libconvoy, with_cudnn: Path, cudnn: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("FAKE_CUDNN_FAIL", name)
    monkeypatch.setenv("FAKE_CUDA_FAIL", name)
    assert library.status(with_cudnn) == GPU_FAILED
    assert str(with_cudnn) in library.error()
    assert ("cuDNN refused" in library.error()) == name.startswith("cudnn")


def test_damaged_runs_of_cudnn_are_refused(
    library: Libconvoy, with_cudnn: Path, cudnn: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from convoy.package.cuda import cuda_contents

    monkeypatch.setattr(cuda_contents, "cudnn_version", lambda: 91900)
    with zipfile.ZipFile(with_cudnn) as archive:
        data = json.loads(archive.read("programs/p0.json"))
    for field, value in (
        ("plan", "cudnn/p9.json"), ("plan", 1), ("operands", [[101, 9, 0]]), ("operands", [[101, 0]]), ("operands", 1),
        ("operands", [[uid, 0, 0] for uid in range(65)]), ("workspace", [1, 400]), ("workspace", None), ("workspace_bytes", -1),
    ):  # fmt: skip
        changed = json.loads(json.dumps(data))
        changed["nodes"][4][field] = value
        content = json.dumps(changed).encode()
        monkeypatch.setattr(cuda_contents, "graph_bytes", lambda graph, content=content: content)
        path = write(tmp_path / "wrong.convoy", cudnn=True)
        assert library.status(path) == codes.DAMAGED, (field, value)
    monkeypatch.undo()
    monkeypatch.setattr(cuda_contents, "cudnn_version", lambda: 0)  # a manifest that does not say what it needs
    assert library.status(write(tmp_path / "silent.convoy", cudnn=True)) == codes.DAMAGED


def test_opening_and_closing_leaves_nothing(
    library: Libconvoy, package: Path, with_cudnn: Path, fake: ctypes.CDLL, cudnn: ctypes.CDLL
) -> None:
    for _ in range(50):
        assert library.status(package) == 0
        assert library.status(with_cudnn) == 0
    assert fake.fake_cuda_alive() == 0
