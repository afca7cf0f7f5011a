"""PackagedCudaProgram with a fake CUDA driver and PyTorch's CPU memory, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from convoy.engines.compilers.host_compiler import compiler_support
from tests.unit.package.cuda.recorded import compiled_fake, compiled_fake_cudnn

CHILD = """
import ctypes, os, sys
import torch
from convoy.errors import PackageError
from convoy.package.cuda.cuda_program import KernelFunctions, PackagedCudaProgram
from convoy.package.cuda.cudnn_backend import CudnnPlans
from tests.unit.package.cuda.recorded import PLAN_TEXT, Scaled, ScaledByCudnn, W, launches

fake = ctypes.CDLL("libcuda.so.1")
fake.fake_cuda_enter()
KERNELS = [("affine", b"fake cubin"), ("doubled", b"fake cubin")]
known = {}
made = [
    PackagedCudaProgram(launches("w"), KernelFunctions(KERNELS, "net"), {"w": W}, known, torch.device("cpu")) for _ in range(2)
]
assert list(known) == ["w"] and made[0]._blocks[3] is made[1]._blocks[3]
for seed in range(3):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
    for program in made:
        (y,) = program([x])
        assert torch.equal(y, Scaled()(x)), (y, Scaled()(x))
try:
    KernelFunctions([("affine", b"another file")], "net.convoy")
except PackageError as error:
    assert "net.convoy" in str(error) and "CUDA_ERROR_INVALID_VALUE" in str(error), error
else:
    raise AssertionError("a binary that the driver refuses")
cudnn = ctypes.CDLL("libcudnn.so.9")
plans = CudnnPlans({"cudnn/p0.json": PLAN_TEXT.encode()}, "net.convoy")
run = PackagedCudaProgram(
    launches("w", "cudnn/p0.json"), KernelFunctions(KERNELS, "net"), {"w": W}, known, torch.device("cpu"), plans
)
del plans
for seed in range(3):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
    (y,) = run([x])
    assert torch.equal(y, ScaledByCudnn()(x)), (y, ScaledByCudnn()(x))
assert cudnn.fake_cudnn_alive() == 2, cudnn.fake_cudnn_alive()  # a handle and a plan
del run
assert cudnn.fake_cudnn_alive() == 0, cudnn.fake_cudnn_alive()
for text, function in ((b"no plan", ""), (PLAN_TEXT.encode(), "cudnnBackendFinalize"), (PLAN_TEXT.encode(), "cudnnCreate")):
    os.environ["FAKE_CUDNN_FAIL"] = function
    try:
        CudnnPlans({"cudnn/p0.json": text}, "net.convoy")
    except PackageError as error:
        assert "net.convoy" in str(error) and "CUDNN_STATUS" in str(error), error
    else:
        raise AssertionError("a plan that cuDNN refuses")
assert fake.fake_cuda_alive() == 4, fake.fake_cuda_alive()  # two modules, two graphs
del program, made
assert fake.fake_cuda_alive() == 0, fake.fake_cuda_alive()
print("right")
"""

pytest.importorskip("cuda.bindings")


@pytest.mark.skipif(not compiler_support(), reason="needs a C compiler")
def test_it_gives_the_outputs_of_the_module(tmp_path: Path) -> None:
    folder = str(compiled_fake(tmp_path).parent)
    compiled_fake_cudnn(tmp_path)
    path = os.pathsep.join([str(Path.cwd()), *sys.path])
    environment = {**os.environ, "LD_LIBRARY_PATH": folder, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert done.stdout.strip() == "right", done.stderr[-3000:]
