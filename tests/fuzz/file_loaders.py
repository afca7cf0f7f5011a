"""Every loader of files from elsewhere, with good files to mutate. A new loader is one function here, marked with `@loader`."""

from __future__ import annotations

import functools
import gzip
import io
import json
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from convoy.perfdb.row import Measurement

Load = Callable[[Path], object]


@dataclass(frozen=True, slots=True)
class Loader:
    """How files of one kind are read.

    Attributes:
        name: of the kind.
        suffix: of its files' names.
        load: reads a file, and does with it what a command would; raises ConvoyError alone.
        seeds: contents of good files.
        share: of the mutations of `make fuzz` that it gets, beside the others' shares.
        unwrap: the part of a file that is mutated inside its wrapping (what gzip compresses), with `wrap` as its inverse.
        wrap: see `unwrap`.
    """

    name: str
    suffix: str
    load: Load
    seeds: list[bytes]
    share: float = 1.0
    unwrap: Callable[[bytes], bytes] | None = None
    wrap: Callable[[bytes], bytes] | None = None


_MAKERS: dict[str, Callable[[], Loader]] = {}


def loader(make: Callable[[], Loader]) -> Callable[[], Loader]:
    """Register a loader by the name of the function that makes it."""
    _MAKERS[make.__name__] = make
    return make


def names() -> list[str]:
    """Of all loaders."""
    return list(_MAKERS)


def made(name: str) -> Loader:
    """A loader, with what it imports."""
    return _MAKERS[name]()


# --- plans ----------------------------------------------------------------------------------------------------------------


def _plan_text() -> bytes:
    from convoy import plan as plans
    from convoy.plan import Plan, Step
    from convoy.problem import ConvProblem, EngineConfig, Knobs

    first = ConvProblem(1, 3, 8, 8, 4, 3, 3, layout="nhwc")
    steps = (
        Step("convert", "", (), ("x",), ("x@nhwc",), "layout:nchw:nhwc:fp32[1,3,8,8]", EngineConfig("aten"), "nhwc", 1.5),
        Step(
            "region", "conv", ("conv", "relu"), ("x@nhwc",), ("relu",), first.key,
            EngineConfig("triton.implicit_gemm", 3, Knobs.of(block_m=64, flat=True)), "nhwc", 7.25, 4096, 1, (0,),
        ),
    )  # fmt: skip
    target = {"device": "cpu", "name": "a CPU", "digest": "f" * 16, "versions": {"torch": "2.13.0"}}
    plan = Plan(
        "net", "0123456789abcdef", ("fp32[1,3,8,8]",), target, "as_torch", steps, "exact", 8.75, 8.75, 4096, 1024,
        notes=("a note",), border={"x": "nchw", "relu": "nchw"},
    )  # fmt: skip
    return json.dumps(plans.to_dict(plan), indent=1).encode()


@loader
def plan() -> Loader:
    """`convoy explain`, of the whole plan and of a layer, and against itself."""
    from convoy import plan as plans

    def load(path: Path) -> object:
        found = plans.load(path)
        text = plans.explain(found)
        assert all(character.isprintable() or character == "\n" for character in text), "control characters"
        for step in found.steps[:10]:
            if step.nodes:
                plans.explain(found, step.nodes[0])
        return plans.compare(found, found), plans.to_dict(found)

    return Loader("plan", ".json", load, [_plan_text()])


# --- run files and criteria -----------------------------------------------------------------------------------------------


def _run(kind: str, rows: list[dict[str, object]]) -> bytes:
    manifest: dict[str, object] = {
        "date": "2026-01-02T03:04:05Z", "request": {"command": kind, "batch": [1]}, "protocol": "wall clock", "commit": "abc",
        "target": {"name": "a CPU", "arch": "avx2", "units": 4, "digest": "0" * 16}, "versions": {"torch": "2.13.0"},
        "system": {"os": "Linux", "cores": 4, "load": 0.5}, "clocks": {"governor": "x"}, "notes": ["busy"],
    }  # fmt: skip
    if kind == "study":
        rules = ["channels <= 16:", "  aten 1.0, gemm 1.2 [3 layers]", "else:", "  gemm 1.1 [2 layers]"]
        manifest["criteria"] = {"layers": 5, "rules": rules, "check": None, "note": "too few"}
    return json.dumps({"kind": kind, "schema": 1, "manifest": manifest, "rows": rows}, indent=1).encode()


def _figure(metric: str, unit: str, value: float) -> dict[str, object]:
    return {"metric": metric, "unit": unit, "p50": value, "p20": 0.9 * value, "p80": 1.2 * value}


def _latency(provider: str, time_ms: float, **more: object) -> dict[str, object]:
    figures = [_figure("latency_ms", "ms", time_ms), _figure("peak_memory_bytes", "B", 5e6)]
    return {"subject": "net", "provider": provider, "figures": figures, **more}


def _runs() -> list[bytes]:
    layer = {"name": "conv", "engine": "aten", "median_us": 5.0, "flops": 1000, "bytes_min": 100}
    span = {"name": "conv", "engine": "aten", "stream": 0, "start_us": 0.0, "duration_us": 5.0, "critical": True}
    detail = {
        "kinds": {"conv": 1.5, "pool": 0.5}, "samples": {"latency_ms": [1.0, 2.0, 3.0]}, "layers": [layer], "timed": "in turn",
        "peaks": {"bytes_per_s": 1e10, "flops_fp32": 1e12}, "timeline": [span],
    }  # fmt: skip
    compared = [
        _latency("convoy", 1.5, detail=detail, notes=["a note"], setting="nhwc"),
        _latency("torch", 2.5, noisy=True),
        {"subject": "net", "provider": "jax", "status": "absent", "reason": "not installed"},
    ]
    options = [
        _latency("defaults", 2.0, detail={"role": "defaults", "option": "defaults"}),
        _latency("channels_last", 1.5, detail={"role": "alone", "option": "channels_last", "gain": 1.3, "kept": True}),
        _latency("best", 1.4, detail={"role": "best", "gain": 1.4, "advice": "use it", "worth": 1.1, "kept": True}),
    ]
    study = [
        {
            "subject": f"sweep:{axis}", "provider": name, "mode": "fprop", "axes": {axis: size},
            "figures": [_figure("time_us", "us", size * cost), _figure("workspace_bytes", "B", 64.0)],
        }
        for axis in ("c", "k") for size in (16, 32) for name, cost in (("gemm", 1.0), ("direct", 1.5))
    ]  # fmt: skip
    study.append(
        {
            "subject": "net", "provider": "exact", "figures": [_figure("total_us", "us", 9.0)],
            "detail": {"predicted": 1, "problems": 3},
        }
    )  # fmt: skip
    scaling = [
        {
            "subject": "net", "provider": "convoy", "mode": "training", "axes": {"gpus": gpus, "scaling": "weak"},
            "figures": [_figure(name, "ms", 3.0) for name in ("step_ms", "images_per_s", "efficiency", "exposed_ms")],
            "detail": {"noisy": ["bare"]},
        }
        for gpus in (1, 2)
    ]  # fmt: skip
    return [_run("compare", compared), _run("options", options), _run("study", study), _run("scaling", scaling)]


@loader
def run_file() -> Loader:
    """A run file, as `convoy report` and an interrupted run read it."""
    from convoy.compare.runs.runfile import read, to_dict

    def load(path: Path) -> object:
        return to_dict(read(path))

    return Loader("run_file", ".json", load, _runs())


@loader
def report() -> Loader:
    """`convoy report RUN -o page.html` and `convoy report --diff RUN RUN`."""
    from convoy.compare.runs.difference import difference
    from convoy.compare.runs.difference_page import difference_sheet
    from convoy.compare.runs.run_page import sheet_of
    from convoy.compare.runs.runfile import read
    from convoy.report.sheet import render_sheet

    def load(path: Path) -> object:
        found = read(path)
        page = render_sheet(sheet_of([found]))
        assert "<script" not in page.split("</head>")[1].replace("<script>", "", 1), "a script in the page"
        changes = difference(found, found)
        return changes.lines(), render_sheet(difference_sheet(changes, found, found))

    return Loader("report", ".json", load, _runs(), share=0.1)


@loader
def criteria() -> Loader:
    """Criteria that `convoy study` learned, beside the database."""
    from convoy.perfdb.shipped import shipped_folder
    from convoy.target import Target
    from convoy.tune.criteria import Criteria, TreeLeaf, TreeSplit
    from convoy.tune.criteria_file import criteria_json, find_criteria

    known = Target("cpu", "a CPU", "avx2", 4, 8 << 30, 1 << 20, (("torch", "2.13.0"),))
    root = TreeSplit("gemm_k", 16.0, TreeLeaf(3, {"aten": 0.0, "gemm": 0.25}), TreeLeaf(2, {"gemm": 0.5}))
    found = Criteria(known, "p1", {"aten": 2, "gemm": 1}, ("conv",), root, 5, "2026-01-02", "abc")

    def load(path: Path) -> object:
        name = f"perf-{known.digest}.criteria.json"
        beside = path.rename(path.with_name(name))
        return find_criteria(known, beside.with_name("perf.db"), shipped_folder() / "none")

    return Loader("criteria", ".json", load, [criteria_json(found).encode()])


@loader
def peaks() -> Loader:
    """A device's peak rates, beside the database and shipped."""
    from convoy.measurement import Peaks
    from convoy.measurement.device.known_peaks import DevicePeaks, peaks_json, read_peaks
    from convoy.target import Target

    known = Target("cpu", "a CPU", "avx2", 4, 8 << 30, 1 << 20, (("torch", "2.13.0"),))
    text = peaks_json(DevicePeaks(known, Peaks(1e10, {"fp32": 1e11, "bf16": 2.5e11}, 3e10, known.cache_bytes)))
    return Loader("peaks", ".json", lambda path: peaks_json(read_peaks(_text(path), "file")), [text.encode()])


# --- rows of the performance database ---------------------------------------------------------------------------------------


def _rows(path: Path) -> object:
    from convoy.errors import InputError
    from convoy.perfdb.transfer import read_file

    found = read_file(path)
    if found.refused:
        raise InputError(path.name, f"line {found.refused[0].line}", "well-formed rows", found.refused[0].reason)
    return found


def _measurements() -> list[Measurement]:
    from convoy.perfdb.row import Measurement, Status
    from convoy.problem import ConvProblem, EngineConfig, Knobs

    key = ConvProblem(1, 3, 8, 8, 4, 3, 3).key
    return [
        Measurement(
            key, EngineConfig("aten", 2), "0" * 16, "p1", Status.OK, 9, 12.5, 0.25, 1e-7, 64, 128, date="2026-01-02"
        ),
        Measurement(
            key, EngineConfig("gemm", 1, Knobs.of(images=1)), "0" * 16, "p1", Status.TIMEOUT, reason='too "slow", it is'
        ),
    ]


def _csv() -> bytes:
    import tempfile

    from convoy.perfdb.transfer import write_rows

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.csv"
        write_rows(_measurements(), file)
        return file.read_bytes()


def _json_lines() -> bytes:
    from convoy.perfdb.record import to_record
    from convoy.perfdb.row import Measurement, Status
    from convoy.problem import ConvProblem, EngineConfig, SubgraphProblem
    from convoy.target import Target

    target = Target("cpu", "a CPU", "avx2", 4, 8 << 30, 1 << 20, (("torch", "2.13.0"),))
    row = Measurement(
        ConvProblem(1, 3, 8, 8, 4, 3, 3).key, EngineConfig("aten", 2), target.digest, "p1", Status.OK, 9, 12.5
    )
    piece = SubgraphProblem(
        "graph 1\ninput %v0: fp32[1,4]\n%v1: fp32[1,4] = aten.relu.default(%v0)\nreturn %v1\n", "any"
    )
    lines = [
        {"table": "database", "schema_version": 1},
        {"table": "targets", "digest": target.digest, "json": target.to_dict()},
        {"table": "texts", "key": piece.key, "text": piece.text},
        {"table": "measurements", **to_record(row)},
    ]
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def _gzip(data: bytes) -> bytes:
    return gzip.compress(data, 1, mtime=0)


@loader
def rows_csv() -> Loader:
    """`convoy db import rows.csv`."""
    return Loader("rows_csv", ".csv", _rows, [_csv()])


@loader
def rows_json_lines() -> Loader:
    """`convoy db import rows.jsonl`."""
    return Loader("rows_json_lines", ".jsonl", _rows, [_json_lines()])


@loader
def rows_csv_gz() -> Loader:
    """`convoy db import rows.csv.gz`: gzip's own bytes damaged."""
    return Loader("rows_csv_gz", ".csv.gz", _rows, [_gzip(_csv())])


@loader
def rows_json_lines_gz() -> Loader:
    """`convoy db import rows.jsonl.gz`: a whole gzip file of damaged lines."""
    return Loader("rows_json_lines_gz", ".jsonl.gz", _rows, [_gzip(_json_lines())], unwrap=gzip.decompress, wrap=_gzip)


@loader
def shipped() -> Loader:
    """Rows that ship with the package, each checked when it is asked for."""
    from convoy.perfdb.shipped_form import encode_rows
    from convoy.perfdb.shipped_table import read_table
    from convoy.tune.predict import TimePredictor

    def load(path: Path) -> object:
        with path.open("rb") as file:
            table = read_table(file, path.name, "0" * 16)
        return table.rows(), TimePredictor(table.times("p1", ()))

    seed = encode_rows(_measurements(), "0" * 16)
    return Loader("shipped", ".rows.gz", load, [seed], unwrap=gzip.decompress, wrap=_gzip)


@loader
def target() -> Loader:
    """A target's description, beside shipped rows and in the database."""
    from convoy.perfdb.record import read_target
    from convoy.target import Target

    known = Target("cpu", "a CPU", "avx2", 4, 8 << 30, 1 << 20, (("torch", "2.13.0"),))

    def load(path: Path) -> object:
        return read_target(known.digest, _text(path))

    return Loader("target", ".json", load, [json.dumps(known.to_dict()).encode()])


@loader
def database() -> Loader:
    """`convoy db merge`: another database, which may be damaged; what it holds of good rows is taken in."""
    import tempfile

    from convoy.perfdb import Database

    with tempfile.TemporaryDirectory() as folder:
        rows, file = Path(folder) / "rows.jsonl", Path(folder) / "perf.db"
        rows.write_bytes(_json_lines())
        with Database.open(file, shipped=False) as made_here:
            made_here.import_(rows)
        content = file.read_bytes()

    def load(path: Path) -> object:
        with Database(None, shipped=False) as own:
            return own.merge(path, partial=True)

    return Loader("database", ".db", load, [content], share=0.1)


# --- texts inside of files --------------------------------------------------------------------------------------------------


def _text(path: Path) -> str:
    return path.read_bytes().decode("utf-8", "replace")


def _lines(*texts: str) -> list[bytes]:
    return [text.encode() for text in texts]


@loader
def graph_text() -> Loader:
    """A graph's text, as the database keeps it of pieces."""
    from convoy.graph.text import digest, parse_graph
    from convoy.graph.verify import verify

    def load(path: Path) -> object:
        graph = parse_graph(_text(path))
        verify(graph)
        return digest(graph)

    text = (
        "graph 1\ninput %x: fp32[1,3,8,8]\nconstant %w: fp32[4,3,3,3]\n"
        "%y: fp32[1,4,8,8] = conv2d(%x, %w, None, (1, 1), (1, 1), (1, 1), 1)\n"
        "%p: fp32[1,4,4,4], _ = aten.max_pool2d_with_indices.default(%y, (2, 2)) as %q\n"
        '%z: fp32[1,4,4,4] = aten.add.Tensor(%p, 1.5, alpha=-2, mode="a\\"b", dtype=dtype.fp32)\nreturn %z, %x\n'
    )
    return Loader("graph_text", ".txt", load, _lines(text))


@loader
def problem_key() -> Loader:
    """Problems' keys and knobs, as rows and plans hold them."""
    from convoy.problem import ConvProblem, Epilogue, Knobs, LinearProblem, Pool, WeightMask, parse_problem

    def load(path: Path) -> object:
        text = _text(path)
        if text.startswith("mask:"):
            return WeightMask.parse(text)
        return parse_problem(text) if ":" in text else Knobs.parse(text)

    pooled = ConvProblem(1, 3, 8, 8, 4, 3, 3, epilogue=Epilogue(True, False, "relu", Pool("max", 2, 2, 2, 2)))
    mask = WeightMask((2, 1, 2, 2), b"\xf0")
    return Loader(
        "problem_key", ".txt", load,
        _lines(pooled.key, LinearProblem(1, 2, 3).key, "layout:nchw:nhwc:fp32[1,3,8,8]", mask.text, "block_m=64,pdl=true"),
    )  # fmt: skip


# --- models, data sets and compiled code -------------------------------------------------------------------------------------


def _images() -> dict[str, Any]:
    import numpy as np

    pixels = np.arange(2 * 3 * 8 * 8, dtype=np.uint8).reshape(2, 3, 8, 8)
    return {"images": pixels, "labels": np.array([1, 0])}


def _image(kind: str) -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(_images()["images"][0].transpose(1, 2, 0)).resize((24, 16)).save(stream, kind)
    return stream.getvalue()


def _read_images(path: Path) -> object:
    from convoy.zoo import load_images

    return load_images([path], size=8)


def _read_data(path: Path) -> object:
    from convoy.zoo import Preprocessing, load_dataset

    found = load_dataset(str(path), "all", preprocessing=Preprocessing(8))
    return next(iter(found.batches(2)))


@loader
def image() -> Loader:
    """Image files, whatever their names say they are."""
    return Loader(
        "image", ".png", _read_images, [_image(kind) for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP")]
    )


@loader
def npz() -> Loader:
    """A data set in an .npz file."""
    import numpy as np

    seeds = []
    for save in (np.savez, np.savez_compressed):
        stream = io.BytesIO()
        save(stream, **_images())
        seeds.append(stream.getvalue())
    return Loader("npz", ".npz", _read_data, seeds)


@loader
def safetensors_data() -> Loader:
    """A data set in a .safetensors file, of pixels and of JPEG files."""
    import numpy as np
    from safetensors.numpy import save

    jpeg = np.frombuffer(_image("JPEG"), np.uint8)
    files = {"jpeg": jpeg, "offsets": np.array([0, jpeg.size]), "labels": np.array([0])}
    return Loader("safetensors_data", ".safetensors", _read_data, [save(_images()), save(files)])


@loader
def weights() -> Loader:
    """Weights of a model."""
    import torch
    from safetensors.torch import save
    from torch import nn

    from convoy.zoo.weights import load_into, read

    model = nn.Conv2d(3, 4, 3)

    def load(path: Path) -> object:
        return load_into(model, read(path), path)

    return Loader("weights", ".safetensors", load, [save({"weight": torch.ones(4, 3, 3, 3), "bias": torch.ones(4)})])


def _program() -> bytes:
    import torch
    from torch import nn

    net = nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten())
    shapes = ({0: torch.export.Dim.AUTO, 2: torch.export.Dim.AUTO},)
    stream = io.BytesIO()
    torch.export.save(torch.export.export(net.eval(), (torch.ones(2, 3, 4, 4),), dynamic_shapes=shapes), stream)
    return stream.getvalue()


def _read_program(path: Path) -> object:
    from convoy.zoo import load_model

    return load_model(str(path))


@loader
def pt2() -> Loader:
    """A saved torch.export program: its archive damaged."""
    return Loader("pt2", ".pt2", _read_program, [_program()], share=0.2)


def _onnx() -> bytes:
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    weight = numpy_helper.from_array(np.ones((2, 3, 3, 3), np.float32), "w")
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("Clip", ["c"], ["r"], min=0.0, max=6.0),
        helper.make_node("Resize", ["r", "", "s"], ["u"], mode="nearest"),
        helper.make_node("Flatten", ["u"], ["y"]),
    ]
    scales = numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "s")
    value = helper.make_tensor_value_info
    inputs, outputs = [value("x", TensorProto.FLOAT, ["n", 3, 8, 8])], [value("y", TensorProto.FLOAT, ["n", 128])]
    graph = helper.make_graph(nodes, "net", inputs, outputs, [weight, scales])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()


@loader
def onnx() -> Loader:
    """ONNX files, as far as their nodes and constants; running the graph is PyTorch's."""
    from convoy.errors import InputError
    from convoy.zoo.onnx_model.module import OnnxModule
    from convoy.zoo.onnx_model.read import read_graph
    from convoy.zoo.onnx_model.value import UnsupportedOnnxError

    def load(path: Path) -> object:
        try:
            return OnnxModule(read_graph(path))
        except UnsupportedOnnxError as error:
            raise InputError("model", str(path), "supported operators", str(error)) from error

    return Loader("onnx", ".onnx", load, [_onnx()], share=0.3)


def _entry(name: str) -> Loader:
    """A sound archive of a program with one damaged entry."""
    whole = _program()

    def names(data: bytes) -> dict[str, bytes]:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return {found: archive.read(found) for found in archive.namelist()}

    def unwrap(data: bytes) -> bytes:
        return next(content for found, content in names(data).items() if found.endswith(name))

    def wrap(content: bytes) -> bytes:
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w") as archive:
            for found, data in names(whole).items():
                archive.writestr(found, content if found.endswith(name) else data)
        return stream.getvalue()

    return Loader(f"pt2 {name}", ".pt2", _read_program, [whole], share=0.2, unwrap=unwrap, wrap=wrap)


@loader
def pt2_program() -> Loader:
    """A saved torch.export program: its graph damaged."""
    return _entry("models/model.json")


@loader
def pt2_weights() -> Loader:
    """A saved torch.export program: the table of its weights damaged."""
    return _entry("model_weights_config.json")


@loader
def pt2_inputs() -> Loader:
    """A saved torch.export program: the pickle of its example inputs damaged."""
    return _entry("data/sample_inputs/model.pt")


@loader
def symbolic_size() -> Loader:
    """Symbolic sizes inside of programs."""
    from convoy.errors import InputError
    from convoy.zoo.pt2.expressions import evaluate, solve
    from convoy.zoo.pt2.refusal import RefusedError

    def load(path: Path) -> object:
        try:
            return evaluate(_text(path), {"s0": 4, "s1": 7}), solve(_text(path), 12, {"s1": 7})
        except RefusedError as refused:
            raise InputError(path.name, refused.found, "a symbolic size") from refused

    texts = _lines(
        "Mul(Integer(3), Symbol('s0', positive=True, integer=True))", "2*s0 + s1//2 - Max(1, -3 + s0) % 5 > 1"
    )
    return Loader("symbolic_size", ".txt", load, texts)


@loader
def compiled_code() -> Loader:
    """Files of the cache of compiled code: a damaged one is as good as none."""
    from convoy.engines.compilers.compiled_cache import folder_at, summed
    from convoy.errors import InputError

    def load(path: Path) -> object:
        folder = folder_at(path.parent)
        found = None if folder is None else folder.read(path.name)
        if found is None:
            raise InputError(path.name, "", "a whole file")
        return found

    return Loader("compiled_code", ".so", load, [summed(b"code" * 50, mark=mark) for mark in (True, False)])


@functools.cache
def _package() -> bytes:
    """A package of a small net with a packed weight, a constant, two outputs and a step of PyTorch's."""
    import torch

    import convoy

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.Linear(16, 3)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            y = torch.tanh(torch.nn.functional.max_pool2d(torch.relu(self.conv(x)), 2))
            return {"map": y, "scores": self.head(y.flatten(1))}

    from tests.unit.program.fast_net import always_kept

    net, x = Net().eval(), torch.ones(1, 3, 4, 4)
    settings = convoy.Settings(effort="none", isolate=False, only_engines=("cpu.direct", "cpu.pooling", "cpu.layout"))
    with tempfile.TemporaryDirectory() as folder, always_kept():
        return convoy.export(net, Path(folder) / "net.convoy", (x,), settings=settings).read_bytes()


def _run_package(path: Path) -> object:
    import convoy

    net = convoy.open(path)
    return net(*net.example_inputs())


@loader
def package() -> Loader:
    """`convoy run net.convoy`: the file damaged."""
    return Loader("package", ".convoy", _run_package, [_package()], share=0.1)


@loader
def recorded_graph() -> Loader:
    """Programs of packages for a GPU."""
    from convoy.package.cuda.graph_file import graph_bytes, read_graph
    from tests.unit.package.cuda.recorded import launches

    def load(path: Path) -> object:
        return read_graph(memoryview(path.read_bytes()), path.name, 2)

    return Loader("recorded_graph", ".json", load, [graph_bytes(launches("t0"))])


@loader
def package_members() -> Loader:
    """`convoy run net.convoy`: a sound archive, with right sums, of damaged members."""
    import hashlib

    from convoy.package.archive import write_archive

    with zipfile.ZipFile(io.BytesIO(_package())) as archive:
        whole = {name: archive.read(name) for name in archive.namelist()}
    texts = [name for name in whole if name.endswith((".json", ".txt"))]

    def as_value(name: str) -> object:
        text = whole[name].decode()
        return json.loads(text) if name.endswith(".json") else text

    def unwrap(_: bytes) -> bytes:
        return json.dumps({name: as_value(name) for name in texts}).encode()

    def wrap(content: bytes) -> bytes:
        members = dict(whole)
        try:
            changed = json.loads(content)
            assert isinstance(changed, dict)
        except (ValueError, RecursionError, AssertionError):
            changed = {"programs/p0.json": content.decode("utf-8", "replace")}
        for name in texts:
            value = changed.get(name, "")
            text = value if isinstance(value, str) else json.dumps(value)
            members[name] = text.encode("utf-8", "replace")
        try:
            manifest = json.loads(members["manifest.json"])
            for name in manifest["sums"]:
                if name in members:
                    manifest["sums"][name] = hashlib.sha256(members[name]).hexdigest()
            members["manifest.json"] = json.dumps(manifest).encode()
        except (ValueError, TypeError, KeyError):
            pass
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "net.convoy"
            write_archive(path, [(name, [data]) for name, data in members.items()])
            return path.read_bytes()

    return Loader("package_members", ".convoy", _run_package, [_package()], share=0.1, unwrap=unwrap, wrap=wrap)


def every() -> Iterator[Loader]:
    """All loaders."""
    return map(made, names())
