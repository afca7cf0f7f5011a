""".pt2 files as data: dynamic shapes, and every way in which a file could make torch.export.load run code."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from convoy.capture.user_hooks import user_hook
from convoy.errors import InputError
from convoy.zoo import example_args, load_model
from convoy.zoo.pt2.expressions import evaluate, solve
from convoy.zoo.pt2.operators import is_allowed
from convoy.zoo.pt2.refusal import RefusedError

Dim = torch.export.Dim
X = torch.linspace(-1, 1, 2 * 3 * 12 * 16).reshape(2, 3, 12, 16)


class Resized(nn.Module):
    """Sizes are computed from sizes, so that a program of it has expressions and guards."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.register_buffer("scale", torch.linspace(0.5, 2, 4).view(4, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = self.conv(x) * self.scale
        y = y.reshape(x.shape[0] * 2, -1, x.shape[2] // 2, x.shape[3])
        return nn.functional.interpolate(torch.div(y, 3, rounding_mode="floor"), size=(x.shape[3] - 3, 7))


def saved(model: nn.Module, path: Path, shapes: Any = None) -> Path:
    torch.export.save(torch.export.export(model.eval(), (X,), dynamic_shapes=shapes), str(path))
    return path


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    auto = {0: Dim.AUTO, 2: Dim.AUTO, 3: Dim.AUTO}
    return saved(Resized(), tmp_path_factory.mktemp("pt2") / "net.pt2", (auto,))


# Dynamic shapes


@pytest.mark.parametrize(
    "shapes",
    [
        None,
        {0: Dim.AUTO},
        {0: Dim("b")},
        {0: Dim("b", min=1, max=64)},
        {0: Dim.DYNAMIC},
        {2: Dim("h", min=8), 3: Dim("w", min=8)},
    ],
    ids=["static", "AUTO", "Dim", "range", "DYNAMIC", "height and width"],
)
def test_programs_give_what_torch_gives(tmp_path: Path, shapes: Any) -> None:
    path = saved(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), tmp_path / "net.pt2", None if shapes is None else (shapes,)
    )
    model, stock = load_model(str(path)), torch.export.load(path).module()
    (x,) = example_args(model)
    assert torch.equal(x, X)
    assert torch.equal(model(x), stock(x))
    for other in (torch.cat([X, X]), X[:, :, :, :13], X[:, :, 2:, :14], X[:1, :, :, :9].expand(100, 3, 12, 9)):
        assert outcome(model, other) == outcome(stock, other)


@pytest.mark.parametrize("name", ["nét 模型.pt2", "a b.pt2"])
def test_a_file_may_have_any_name(tmp_path: Path, name: str) -> None:
    """torch names the folder in the archive after the file."""
    model = nn.Conv2d(3, 2, 3)
    found = load_model(str(saved(model, tmp_path / name)))
    with torch.no_grad():
        torch.testing.assert_close(found(X), model(X))


def test_a_size_derived_from_another(tmp_path: Path) -> None:
    path = saved(nn.Conv2d(3, 4, 3), tmp_path / "net.pt2", ({3: 2 * Dim("w", min=4)},))
    model, stock = load_model(str(path)), torch.export.load(path).module()
    assert torch.equal(model(X[:, :, :, 4:]), stock(X[:, :, :, 4:]))
    for width in (6, 13):  # below twice the least, and no double of a size
        with pytest.raises(RuntimeError, match="dimension 3"):
            model(X[:, :, :, :width])


def outcome(model: nn.Module, x: torch.Tensor) -> object:
    try:
        return model(x).tolist()
    except (RuntimeError, AssertionError):
        return "refused"


def test_sizes_computed_from_sizes(program: Path) -> None:
    model, stock = load_model(str(program)), torch.export.load(program).module()
    for x in (X, torch.cat([X, X]), X[:, :, :, 4:], X[:, :, :8]):
        assert torch.equal(model(x), stock(x))
    for x in (X[:, :, :11], X[:, :2], X[0]):  # half a row, another number of channels, no batch
        with pytest.raises(RuntimeError, match="exported for"):
            model(x)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("s0", 4),
        ("Symbol('s0', positive=True, integer=True)", 4),
        ("Mul(Integer(3), Symbol('s0', positive=True, integer=True), Symbol('s1'))", 84),
        ("2*s0 + s1//2 - 1", 10),
        ("(s0 + s1) % 5", 1),
        ("-s0**2", -16),
        ("Max(1, Add(s0, Integer(-3)))", 1),
        ("FloorDiv(Add(s1, Integer(-1)), Integer(2)) + 1", 4),
        ("floor(s1/2)", 3),
        ("Mul(Rational(1, 2), s0)", 2),
        ("Eq(Mod(s0, 2), 0)", True),
        ("(s0 % 2) != 0", False),
    ],
)
def test_symbolic_sizes(text: str, value: object) -> None:
    assert evaluate(text, {"s0": 4, "s1": 7}) is value or evaluate(text, {"s0": 4, "s1": 7}) == value


def test_a_symbol_is_found_from_a_size() -> None:
    assert solve("Mul(Integer(2), Symbol('s65', positive=True, integer=True))", 8, {}) == ("s65", 4)
    assert solve("2*s0 + s1", 8, {"s1": 2}) == ("s0", 3)
    assert solve("2*s0", 7, {}) is None
    assert solve("s0*s1", 8, {}) is None


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "Symbol('s0').func",
        "Symbol('__import__')",
        "Symbol('s0', positive=True, integer=1)",
        "exec('1')",
        "lambda: 1",
        "s0.real",
        "[s0]",
        "9**9**9",
        "Pow(9, 999)",
        "9" * 5000,
        "(" * 5000 + "s0" + ")" * 5000,
        "1" + "+1" * 6000,
        "s0/0",
        "s0/3",
        "u1",
        "s0 s0",
        "Max()",
        "And(1, 2)",
        "",
        "\x00",
        "\N{MATHEMATICAL BOLD SMALL S}0",
    ],
)
def test_what_is_no_arithmetic_is_refused(text: str) -> None:
    with pytest.raises(RefusedError):
        evaluate(text, {"s0": 4})


def test_a_programs_own_checks_are_no_hooks_of_the_users(program: Path) -> None:
    """A user's hook makes PyTorch run the module; these may go."""
    assert user_hook(load_model(str(program))) == user_hook(load_model(str(program), trust=True)) == ""


# Code in files


class Planted:
    """Unpickling it would make a file: the proof that it was run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (Path.touch, (self.path,))


def edited(source: Path, to: Path, entries: dict[str, bytes | None], *, compress: bool = False) -> Path:
    """A copy of an archive in which entries have other contents, are added, or (None) are left out."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(to, "w", zipfile.ZIP_DEFLATED if compress else 0) as new:
        there = {name.partition("/")[2]: old.read(name) for name in old.namelist()}
        for name, data in (there | entries).items():
            if data is not None:
                new.writestr(f"net/{name}", data)
    return to


def with_json(source: Path, to: Path, change: Callable[[Any], object], name: str = "models/model.json") -> Path:
    with zipfile.ZipFile(source) as old:
        value = json.loads(old.read(f"net/{name}"))
    change(value)
    return edited(source, to, {name: json.dumps(value).encode()})


def torch_saved(value: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def graph(program: Any) -> Any:
    return program["graph_module"]["graph"]


def node(program: Any, word: str) -> Any:
    return next(n for n in graph(program)["nodes"] if word in n["target"])


CODE = "__import__('pathlib').Path({mark!r}).touch()"

ENTRIES: dict[str, Callable[[Path], dict[str, bytes | None]]] = {
    "opaque object": lambda mark: {"data/constants/opaque_obj_0": pickle.dumps(Planted(mark))},
    "custom object": lambda mark: {"data/constants/custom_obj_0": pickle.dumps(Planted(mark))},
    "compiled code": lambda _: {"data/aotinductor/model/model.so": b"\x7fELF"},
    "second program": lambda mark: {"models/other.json": CODE.format(mark=str(mark)).encode()},
    "legacy weights": lambda mark: {"data/weights/model.pt": torch_saved(Planted(mark))},
    "letters of another case": lambda mark: {"data/weights/model.PT": torch_saved(Planted(mark))},
    "a second entry": lambda mark: {"Models/Model.json": CODE.format(mark=str(mark)).encode()},
    "example inputs": lambda mark: {"data/sample_inputs/model.pt": torch_saved(Planted(mark))},
    "no example inputs": lambda _: {"data/sample_inputs/model.pt": None},
    "another byte order": lambda _: {"byteorder": b"big"},
    "an outer path": lambda _: {"../x": b""},
}


@pytest.mark.parametrize("way", ENTRIES)
def test_entries_that_are_not_data(program: Path, tmp_path: Path, way: str) -> None:
    mark = tmp_path / "run"
    refused(edited(program, tmp_path / "evil.pt2", ENTRIES[way](mark)), mark)


WAYS: dict[str, Callable[[Any, str], object]] = {
    "a symbolic size": lambda p, code: first_size(p).update({"as_expr": {"expr_str": code, "hint": {"as_int": 2}}}),
    "a size beyond 64 bits": lambda p, _: first_size(p).update({"as_int": 2**70}),
    "a function of a module": lambda p, _: graph(p)["nodes"][0].update(target="torch.os.getcwd"),
    "a function that runs commands": lambda p, _: graph(p)["nodes"][0].update(target="torch.os.system"),
    "an attribute of an operator": lambda p, _: node(p, "aten.div").update(target="torch.ops.aten.conv2d.__class__"),
    "an operator that opens files": lambda p, _: node(p, "aten.div").update(target="torch.ops.aten.from_file.default"),
    "an extension": lambda p, _: node(p, "aten.div").update(target="#executorch:aten.add"),
    "a node's name": lambda p, code: node(p, "aten.div").update(name=code),
    "an input's name": lambda p, code: graph(p)["inputs"][0].update(as_tensor={"name": code}),
    "an argument's name": lambda p, code: node(p, "aten.div")["inputs"][0].update(name=code),
    "an argument of forward": lambda p, code: call(p).update(forward_arg_names=[code]),
    "text between quotes": lambda p, code: mode(p).update(as_string=f"floor' + {code} + '"),
    "a parameter's name": lambda p, code: p["graph_module"]["signature"]["input_specs"][0]["parameter"].update(
        parameter_name=code
    ),
    "a type of arguments": lambda p, _: call(p).update(
        in_spec=call(p)["in_spec"].replace("builtins.dict", "collections.defaultdict")
    ),
    "a key of arguments": lambda p, code: call(p).update(
        in_spec=call(p)["in_spec"].replace('"[]"', json.dumps(json.dumps([code])))
    ),
    "a verifier": lambda p, _: p.update(verifiers=["EVIL"]),
    "a field that nobody knows": lambda p, _: p.update(more=1),
    "a custom object": lambda p, _: graph(p).update(custom_obj_values={"o": {"name": "o", "class_fqn": "os.system"}}),
    "a field of another type": lambda p, _: graph(p).update(nodes={}),
    "a missing field": lambda p, _: graph(p).pop("nodes"),
}


def first_size(program: Any) -> Any:
    size = next(iter(graph(program)["tensor_values"].values()))["sizes"][0]
    size.clear()
    return size


def call(program: Any) -> Any:
    return program["graph_module"]["module_call_graph"][0]["signature"]


def mode(program: Any) -> Any:
    return next(i["arg"] for i in node(program, "aten.div")["inputs"] if "as_string" in i["arg"])


@pytest.mark.parametrize("way", WAYS)
def test_programs_that_are_not_data(program: Path, tmp_path: Path, way: str) -> None:
    mark = tmp_path / "run"
    code = CODE.format(mark=str(mark))
    refused(with_json(program, tmp_path / "evil.pt2", lambda p: WAYS[way](p, code)), mark)


def refused(path: Path, mark: Path) -> None:
    with pytest.raises(InputError, match="model: got") as caught:
        load_model(str(path))
    assert not mark.exists()
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


def test_guards_are_never_source(program: Path, tmp_path: Path) -> None:
    """A guard that is no arithmetic is not run; the program then takes the example's sizes alone."""
    mark = tmp_path / "run"
    code = CODE.format(mark=str(mark))
    model = load_model(str(with_json(program, tmp_path / "a.pt2", lambda p: p["guards_code"].append(code))))
    assert torch.equal(model(X), load_model(str(program))(X))
    with pytest.raises(RuntimeError, match="exported for"):
        model(torch.cat([X, X]))
    assert not mark.exists()


@pytest.mark.parametrize("name", ["weights", "constants"])
@pytest.mark.parametrize("change", ["pickled", "larger than its bytes", "out of nothing", "elsewhere", "another case"])
def test_weights_that_are_not_data(program: Path, tmp_path: Path, name: str, change: str) -> None:
    mark, table = tmp_path / "run", f"data/{name}/model_{name}_config.json"
    meta = {
        "dtype": 7, "sizes": [{"as_int": 1 << 40}], "strides": [{"as_int": 1}], "storage_offset": {"as_int": 0},
        "requires_grad": False, "device": {"type": "cpu", "index": None}, "layout": 7,
    }  # fmt: skip
    file = {"weights": "weight_9", "constants": "tensor_9"}[name]
    entry: dict[str, Any] = {"path_name": file, "is_param": False, "use_pickle": False, "tensor_meta": meta}
    data = {"pickled": torch_saved(Planted(mark)), "out of nothing": b""}.get(change, b"\0" * 64)
    if change == "pickled":
        entry["use_pickle"] = 1
    if change in ("elsewhere", "another case"):
        entry["path_name"] = {"elsewhere": "../../models/model.json", "another case": file.upper()}[change]
    with zipfile.ZipFile(program) as archive:
        config = json.loads(archive.read(f"net/{table}"))
    config["config"]["more"] = entry
    entries = {table: json.dumps(config).encode(), f"data/{name}/{file}": data}
    refused(edited(program, tmp_path / "evil.pt2", entries), mark)


def test_a_bomb_is_refused_before_it_is_unpacked(program: Path, tmp_path: Path) -> None:
    path = edited(program, tmp_path / "bomb.pt2", {"extra/zeros": bytes(64 << 20)}, compress=True)
    assert path.stat().st_size < 1 << 20
    with pytest.raises(InputError, match="is compressed"):
        load_model(str(path))


def test_trust_is_asked_for_and_given(program: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"opaque_obj_0.*--trust \(trust=True\)"):
        load_model(str(edited(program, tmp_path / "a.pt2", {"data/constants/opaque_obj_0": b""})))
    assert torch.equal(load_model(str(program), trust=True)(X), load_model(str(program))(X))


def test_operators() -> None:
    for name in ("conv2d.default", "relu_.default", "max_pool2d.default", "sym_size.int", "_assert_scalar.default"):
        assert is_allowed(f"torch.ops.aten.{name}")
    for name in ("save.default", "from_file.default", "_print.default", "warn.default", "manual_seed.default"):
        assert not is_allowed(f"torch.ops.aten.{name}")
    for target in ("torch.ops.image.read_file.default", "torch.ops.aten.conv2d", "torch.ops.load_library", "os.system"):
        assert not is_allowed(target)
