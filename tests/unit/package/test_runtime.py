"""The C runtime (docs/how-to/c-runtime.md): the same bits as Python, errors as codes with texts, and nothing leaked."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import convoy
from convoy.zoo import load_model
from tests.unit.package import libconvoy as codes
from tests.unit.package.conftest import Block, X, seeded
from tests.unit.package.libconvoy import Libconvoy, Net


def test_it_gives_the_bits_of_python(libconvoy: Libconvoy, portable: Path) -> None:
    y = torch.full((2, 7), float("nan"))
    with libconvoy.opened(portable) as net:
        assert net.info("input", 0) == ("x", (2, 3, 17, 15), 0, X.numel() * 4)
        assert net.info("output", 0)[1:] == ((2, 7), 0, 56)
        for _ in range(3):
            y.fill_(float("nan"))
            assert net.run([X], [y]) == 0, libconvoy.error()
            assert torch.equal(y, convoy.open(portable)(X))


def test_any_number_of_threads_gives_the_same_bits(libconvoy: Libconvoy, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        path = convoy.export(
            seeded(Block), tmp_path / "net.convoy", (X,), portable=True, settings=convoy.Settings(effort="none")
        )
        trusted = convoy.open(path, trust=True)(X)
    finally:
        torch.set_num_threads(before)
    expected, y = convoy.open(path)(X), torch.empty(2, 7)
    assert torch.equal(trusted, expected)
    with libconvoy.opened(path) as net:
        for threads in (1, 2, 3, 8, 1, 0):
            assert libconvoy.library.convoy_set_threads(net.handle, threads) == 0
            for _ in range(5):
                y.zero_()
                assert net.run([X], [y]) == 0
                assert torch.equal(y, expected)
        assert libconvoy.library.convoy_set_threads(net.handle, -1) == codes.INVALID_ARGUMENT


def test_resnet18_gives_the_bits_of_python(libconvoy: Libconvoy, tmp_path: Path) -> None:
    x = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(3))
    model = load_model("resnet18")
    path = convoy.export(
        model, tmp_path / "net.convoy", (x,), portable=True,
        settings=convoy.Settings(effort="none", only_engines=("cpu.direct", "cpu.pooling", "cpu.layout")),
    )  # fmt: skip
    y = torch.empty(1, 1000)
    with libconvoy.opened(path) as net:
        assert net.run([x], [y]) == 0
    assert torch.equal(y, convoy.open(path, trust=True)(x))
    with torch.no_grad():
        torch.testing.assert_close(y, model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_views_of_whole_values_are_copies(
    libconvoy: Libconvoy, tmp_path: Path, memory_format: torch.memory_format
) -> None:
    """No kernel computes a flattening of several pixels, or the opposite."""
    x = X.contiguous(memory_format=memory_format)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(780, 32),
            nn.Unflatten(1, (2, 4, 4)),
            nn.Conv2d(2, 3, 3),
        ).eval()
    path = convoy.export(net, tmp_path / "net.convoy", (x,), portable=True, settings=convoy.Settings(effort="none"))
    y = torch.empty(2, 3, 2, 2)
    with libconvoy.opened(path) as opened:
        y = y.contiguous(
            memory_format=torch.channels_last if opened.info("output", 0)[2] == 1 else torch.contiguous_format
        )
        assert opened.run([x], [y]) == 0
    with torch.no_grad():
        torch.testing.assert_close(y, net(x), rtol=1e-4, atol=1e-5)
        for trust in (False, True):
            torch.testing.assert_close(convoy.open(path, trust=trust)(x), net(x), rtol=1e-4, atol=1e-5)


def test_channels_last_inputs_are_told(libconvoy: Libconvoy, tmp_path: Path) -> None:
    x = X.contiguous(memory_format=torch.channels_last)
    path = convoy.export(
        seeded(Block), tmp_path / "net.convoy", (x,), portable=True, settings=convoy.Settings(effort="none")
    )
    y = torch.empty(2, 7)
    with libconvoy.opened(path) as net:
        assert net.info("input", 0)[2] == 1
        assert net.run([x], [y]) == 0
    assert torch.equal(y, convoy.open(path)(X))


def test_the_program_of_the_inputs_shape_runs(libconvoy: Libconvoy, tmp_path: Path) -> None:
    settings = convoy.Settings(effort="none")
    path = convoy.export(
        seeded(Block), tmp_path / "net.convoy", (X,), more_args=[(X[:1],)], portable=True, settings=settings
    )
    opened = convoy.open(path)
    with libconvoy.opened(path) as net:
        assert libconvoy.library.convoy_program_count(net.handle) == 2
        for x in (X, X[1:].clone()):
            y = torch.empty(len(x), 7)
            assert net.run([x], [y]) == 0, libconvoy.error()
            assert torch.equal(y, opened(x))


@pytest.fixture(scope="module")
def pooling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package whose library has another function alone."""
    model, settings = nn.Sequential(nn.MaxPool2d(2)).eval(), convoy.Settings(effort="none")
    path = tmp_path_factory.mktemp("pooling") / "pooling.convoy"
    return convoy.export(model, path, (X,), portable=True, settings=settings)


def test_two_nets_at_once_run_their_own_code(libconvoy: Libconvoy, pooling: Path, portable: Path) -> None:
    expected, pooled = convoy.open(portable, trust=True)(X), convoy.open(pooling, trust=True)(X)
    torch.testing.assert_close(pooled, nn.functional.max_pool2d(X, 2))
    with libconvoy.opened(pooling) as first, libconvoy.opened(portable) as second, libconvoy.opened(pooling) as third:
        y = torch.empty(2, 7)
        assert second.run([X], [y]) == 0, libconvoy.error()
        assert torch.equal(y, expected)
        for net in (first, third):
            z = torch.empty_like(pooled)
            assert net.run([X], [z]) == 0, libconvoy.error()
            assert torch.equal(z, pooled)


def test_wrong_tensors_are_errors_and_the_net_goes_on(libconvoy: Libconvoy, portable: Path) -> None:
    y = torch.zeros(2, 7)
    with libconvoy.opened(portable) as net:
        wrong = (
            ([X[:1]], [y], r"input x: got fp32[1,3,17,15], expected fp32[2,3,17,15]"),
            ([X.double()], [y], r"input x: got fp64[2,3,17,15], expected fp32[2,3,17,15]"),
            ([X[0]], [y], r"input x: got fp32[3,17,15], expected fp32[2,3,17,15]"),
            ([X], [y[:1]], "got fp32[1,7], expected fp32[2,7]"),
            ([X, X], [y], "inputs: got 2, expected 1"),
            ([], [y], "inputs: got 0, expected 1"),
            ([X], [], "outputs: got 0, expected 1"),
        )
        for inputs, outputs, text in wrong:
            assert net.run(inputs, outputs) == codes.INVALID_ARGUMENT
            assert text in libconvoy.error()
            assert "\n" not in libconvoy.error()
        assert not y.any()
        assert net.run([X], [y]) == 0
        assert torch.equal(y, convoy.open(portable)(X))
        assert libconvoy.library.convoy_run(net.handle, None, 1, None, 1) == codes.INVALID_ARGUMENT
        assert libconvoy.library.convoy_input(net.handle, 0, 1, None) == codes.INVALID_ARGUMENT
    assert libconvoy.library.convoy_open(None, 1, None) == codes.INVALID_ARGUMENT
    assert libconvoy.library.convoy_run(None, None, 0, None, 0) == codes.INVALID_ARGUMENT


def test_code_runs_only_with_trust(libconvoy: Libconvoy, portable: Path) -> None:
    assert libconvoy.status(portable, 0) == codes.NOT_TRUSTED
    assert "CONVOY_TRUST" in libconvoy.error()


def test_threads_share_a_net_and_have_their_own_errors(libconvoy: Libconvoy, portable: Path) -> None:
    opened = convoy.open(portable)
    inputs = [torch.randn(2, 3, 17, 15, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    expected = [opened(x) for x in inputs]
    failures: list[str] = []

    def run(net: Net, index: int) -> None:
        y = torch.empty(2, 7)
        right = [net.run([inputs[index]], [y]) == 0 and torch.equal(y, expected[index]) for _ in range(30)]
        if not all(right):
            failures.append(f"thread {index}")
        libconvoy.library.convoy_input(net.handle, ctypes.c_size_t(0), ctypes.c_size_t(100 + index), None)
        if f"no input {100 + index}" not in libconvoy.error():
            failures.append(libconvoy.error())

    with libconvoy.opened(portable) as net:
        threads = [threading.Thread(target=run, args=(net, index)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


def resident_bytes() -> int:
    """Memory of this process, and its descriptors."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_a_thousand_cycles_leak_nothing(libconvoy: Libconvoy, portable: Path, damaged: Path) -> None:
    damaged.write_bytes(damaged.read_bytes()[:-100])

    def cycle() -> None:
        y = torch.empty(2, 7)
        with libconvoy.opened(portable) as net:
            net.run([X], [y])
            net.run([X[:1]], [y])
        libconvoy.status(damaged)

    for _ in range(100):
        cycle()
    gc.collect()  # what other tests left must not be closed between the two counts
    before, files = resident_bytes(), len([*Path("/proc/self/fd").iterdir()])
    for _ in range(1000):
        cycle()
    assert resident_bytes() - before < 2 << 20, "one leaked block of memory a cycle would be more"
    assert len([*Path("/proc/self/fd").iterdir()]) == files
