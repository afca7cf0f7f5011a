"""A package for a GPU in a model repository of Triton Inference Server: an instance a GPU."""

from __future__ import annotations

from pathlib import Path

from convoy.package.triton_repository import write_triton_repository
from tests.unit.package.cuda.recorded import write


def test_an_instance_for_each_gpu(tmp_path: Path) -> None:
    folder = write_triton_repository(write(tmp_path / "net.convoy"), tmp_path / "models")
    text = (folder / "config.pbtxt").read_text()
    assert "{ kind: KIND_GPU, count: 1 }" in text
    assert "max_batch_size: 4" in text
    assert "data_type: TYPE_FP32, dims: [ 8 ]" in text
