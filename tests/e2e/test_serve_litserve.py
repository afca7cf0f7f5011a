"""The LitServe example: a server with two replicas, asked by a real HTTP client, and ended while it has requests."""

from __future__ import annotations

import base64
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

import convoy

EXAMPLE = Path(__file__).parents[2] / "examples" / "serving" / "serve_litserve.py"
START_S = 120.0
WAIT_MS = 1000
"""Longer than a request takes to arrive: the server is told to end while its requests wait for their batch to fill up."""


class Server:
    """The example in a process of its own."""

    def __init__(self, package: Path, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        words = ("--trust", "--replicas", "2", "--wait-ms", str(WAIT_MS), "--port", str(self.port))
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(EXAMPLE), str(package), *words], stdout=file, stderr=subprocess.STDOUT
            )

    def wait_until_it_serves(self) -> None:
        until = time.monotonic() + START_S
        while time.monotonic() < until and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.1)
        pytest.fail(f"the server does not serve: {self.log.read_text()[-2000:]}")

    def ask(self, x: torch.Tensor) -> tuple[int, list[float]]:
        """Status and output of a request."""
        body = json.dumps({"x": base64.b64encode(x.numpy().tobytes()).decode()}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/predict", body, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.loads(answer.read())["y"]
        except urllib.error.HTTPError as error:
            return error.code, []


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    pytest.importorskip("litserve")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval()
    settings = convoy.Settings(effort="none", only_engines=("aten",))  # nothing is compiled
    package = convoy.export(model, tmp_path / "net.convoy", (torch.zeros(4, 3, 8, 8),), settings=settings)
    made = Server(package, tmp_path / "log")
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()


@pytest.mark.long
def test_requests_are_answered_and_none_is_dropped_at_the_end(server: Server, tmp_path: Path) -> None:
    server.wait_until_it_serves()
    xs = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    (expected,) = convoy.open(tmp_path / "net.convoy").run_samples(xs)
    assert server.ask(xs[0, :1])[0] == 422  # not one sample
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(server.ask, xs))
        assert [status for status, _ in answers] == [200] * 8
        torch.testing.assert_close(torch.tensor([values for _, values in answers]), expected)
        last = [pool.submit(server.ask, x) for x in xs[:3]]
        time.sleep(0.4 * WAIT_MS / 1e3)
        server.process.send_signal(signal.SIGTERM)
        for (status, values), y in zip([one.result() for one in last], expected, strict=False):
            assert status in (200, 503)  # answered, or refused: never a connection that is cut
            if status == 200:
                torch.testing.assert_close(torch.tensor(values), y)
    assert server.process.wait(60) == 0, server.log.read_text()[-2000:]
