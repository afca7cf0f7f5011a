"""Serve a package over HTTP with LitServe: batches with a deadline, several replicas, and an end that drops no request.

    pip install litserve
    convoy export resnet18 --batches 1,4,8 -o resnet18.convoy
    python examples/serving/serve_litserve.py resnet18.convoy --trust --replicas 2 --wait-ms 5

A request is JSON: `{"x": ...}` with the bytes of one sample (C order, little-endian) in base64. The answer is `{"y": [...]}`, the
values of the first output.

SIGTERM and Ctrl-C end the server: it refuses new requests (503), answers those that it has, and stops its processes.
"""

import argparse
import math
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any, ClassVar

import litserve
import torch
from pydantic import Base64Bytes, BaseModel, field_validator

import convoy

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "i64": torch.int64, "u8": torch.uint8}


class Sample(BaseModel):
    """A request. LitServe checks it before it waits for a batch: one that is wrong (422) does no harm to the others."""

    size: ClassVar[int] = 0
    x: Base64Bytes

    @field_validator("x")
    @classmethod
    def has_the_size(cls, x: bytes) -> bytes:
        """Refuse bytes that are not one sample."""
        if len(x) != cls.size:
            raise ValueError(f"{len(x)} bytes; a sample has {cls.size}")
        return x


class PackageAPI(litserve.LitAPI):
    """A package behind `/predict`. LitServe calls `setup` once in each replica.

    Args:
        path: the package.
        trust: run the compiled code that it holds.
        threads: of each replica.
        wait_s: how long the first request of a batch waits for others.
    """

    def __init__(self, path: Path, *, trust: bool, threads: int, wait_s: float) -> None:
        net = convoy.open(path, trust=trust)
        if not net.batch_sizes:
            raise SystemExit(f"{path}: its inputs and outputs are no batches")
        super().__init__(max_batch_size=net.batch_sizes[-1], batch_timeout=wait_s)
        spec = net.inputs[0].spec
        self.shape, self.dtype = spec.shape[1:], DTYPES[spec.dtype]
        Sample.size = math.prod(self.shape) * self.dtype.itemsize
        self.path, self.trust, self.threads = path, trust, threads

    def setup(self, device: str) -> None:
        """Open the package. All replicas share its weights, which are the file's pages in memory."""
        del device
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends its replicas when all requests are answered
        torch.set_num_threads(self.threads)
        self.net = convoy.open(self.path, trust=self.trust)
        for program in range(len(self.net.programs)):
            self.net(*self.net.example_inputs(program))

    def decode_request(self, request: Sample, **_: Any) -> torch.Tensor:
        """One sample as a tensor."""
        return torch.frombuffer(bytearray(request.x), dtype=self.dtype).view(self.shape)

    def predict(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        """A batch, in programs of the exported sizes."""
        if self.max_batch_size == 1:  # LitServe then gives samples, not batches
            return self.net.run_samples(x[None])[0][0]
        return self.net.run_samples(x)[0]

    def encode_response(self, output: torch.Tensor, **_: Any) -> dict[str, Any]:
        """The values of a sample's output."""
        return {"y": output.flatten().tolist()}


class RefuseWhenEnding:
    """Answers new requests by 503 once the server is about to end; an ASGI middleware.

    Args:
        app: the application.
        ending: nonzero from then on; shared by the processes.
    """

    def __init__(self, app: Any, ending: Any) -> None:
        self.app, self.ending = app, ending

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http" and self.ending.value:
            await send({"type": "http.response.start", "status": 503, "headers": [(b"retry-after", b"1")]})
            await send({"type": "http.response.body", "body": b""})
            return
        await self.app(scope, receive, send)


def end_gracefully(server: litserve.LitServer, ending: Any, patience_s: float) -> None:
    """Make SIGTERM and SIGINT refuse new requests, wait for the others, and then end the server."""
    own = os.getpid()

    def end(number: int, _: object) -> None:
        if os.getpid() != own:  # a process of LitServe's, forked: the server ends it
            return
        signal.signal(number, signal.SIG_IGN)
        ending.value = 1
        until = time.monotonic() + patience_s
        while server.active_requests and time.monotonic() < until:
            time.sleep(0.01)
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)


def main() -> None:
    """Read the options and serve."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("package", type=Path)
    parser.add_argument("--trust", action="store_true", help="run the compiled code in the package")
    parser.add_argument("--replicas", type=int, default=1, help="processes that run the net")
    parser.add_argument("--threads", type=int, default=0, help="of each replica; by default the cores are shared out")
    parser.add_argument("--wait-ms", type=float, default=5.0, help="how long a request waits for others of its batch")
    parser.add_argument("--patience-s", type=float, default=30.0, help="how long the end waits for requests")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    threads = options.threads or max(1, torch.get_num_threads() // options.replicas)
    api = PackageAPI(options.package, trust=options.trust, threads=threads, wait_s=options.wait_ms / 1e3)
    ending = multiprocessing.Value("i", 0, lock=False)
    server = litserve.LitServer(
        api,
        accelerator="cpu",
        devices=1,
        workers_per_device=options.replicas,
        track_requests=True,
        middlewares=[(RefuseWhenEnding, {"ending": ending})],
    )
    end_gracefully(server, ending, options.patience_s)
    server.run(host="127.0.0.1", port=options.port, num_api_servers=1, generate_client_file=False, log_level="warning")


if __name__ == "__main__":
    main()
