"""Names to modules: torchvision, timm, a file's factory, a saved program; the same name gives the same weights."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

from convoy.errors import InputError
from convoy.zoo import example_args, example_size, input_size, load_model, model_names, own_dtype, preprocessing
from convoy.zoo.model_names import split_factory

FACTORIES = """
import neighbour
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(5, neighbour.WIDTH, 3)
        self.example_input_array = torch.zeros(2, 5, 9, 9)
    def forward(self, x):
        return self.conv(x)

READY = nn.Conv2d(3, 4, 1)

def needs(a):
    return a
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("WIDTH = 7\n", encoding="utf-8")
    (tmp_path / "nets.py").write_text(FACTORIES, encoding="utf-8")
    return tmp_path / "nets.py"


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.mark.parametrize("name", ["squeezenet1_1", "timm:resnet10t"])
def test_a_librarys_name(name: str) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    model = load_model(name)
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(module.training for module in model.modules())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert same(model, load_model(name))
    with torch.no_grad():
        y = model(*example_args(model, size=96))
    assert y.shape == (1, 1000)
    assert 1e-2 < float(y.std()) < 1e3  # an error in an early layer must show at the output


def test_dtypes_and_classes() -> None:
    model = load_model("squeezenet1_1", dtype="bf16", num_classes=3)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model(*example_args(model, size=64, dtype="bf16")).shape == (1, 3)


def test_names_and_sizes() -> None:
    names = model_names()
    assert {"alexnet", "resnet50", "densenet121"} <= set(names)
    assert not [name for name in names if name.startswith("quantized")]
    assert input_size("alexnet") == 224
    assert input_size("inception_v3") == 299
    assert input_size("timm:resnet10t") >= 160
    assert preprocessing("net.py:make").size == 224
    assert preprocessing("efficientnet_b7").size == preprocessing("efficientnet_b7", "DEFAULT").size == 600


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("alexnett", "Did you mean alexnet"),
        ("timm:resnet10s", "timm:resnet10t?"),
        ("weights.pth", "Weights alone are no model"),
        ("some/folder", "Weights alone are no model"),
        ("", "a torchvision name"),
        ("net.py", "path/to/file.py:factory"),
        ("absent.py:make", "a Python file that is there"),
    ],
)
def test_a_name_that_nobody_has(name: str, expected: str) -> None:
    with pytest.raises(InputError, match="model: got") as caught:
        load_model(name)
    assert expected in str(caught.value)


def test_bad_arguments_are_named() -> None:
    for words, argument in (({"dtype": "fp8"}, "dtype"), ({"num_classes": 0}, "num_classes")):
        with pytest.raises(InputError, match=argument):
            load_model("alexnet", **words)
    with pytest.raises(InputError, match="num_classes"):
        load_model("alexnet", weights="DEFAULT", num_classes=3)


def test_a_files_factory(file: Path) -> None:
    model = load_model(f"{file}:Net", dtype="fp64", trust=True)
    (x,) = example_args(model, dtype="fp64")
    assert x.shape == (2, 5, 9, 9)
    assert x.dtype == torch.float64
    assert model(x).shape == (2, 7, 7, 7)
    assert example_args(model, batch=3, size=11)[0].shape == (3, 5, 11, 11)
    assert isinstance(load_model(f"{file}:READY", trust=True), nn.Conv2d)
    assert split_factory("a:b/c.py:make") == (Path("a:b/c.py"), "make")


@pytest.mark.parametrize(
    ("factory", "expected"),
    [("absent", "It has: Net, needs."), ("needs", "It raised TypeError"), ("nn", "It raised TypeError")],
)
def test_a_factory_that_does_not_do(file: Path, factory: str, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        load_model(f"{file}:{factory}", trust=True)
    assert expected in str(caught.value)


def test_a_factory_has_neither_default_weights_nor_classes(file: Path) -> None:
    for words in ({"weights": "DEFAULT"}, {"num_classes": 3}):
        with pytest.raises(InputError, match="factory gives its own classes"):
            load_model(f"{file}:Net", trust=True, **words)


@pytest.mark.parametrize(("argument", "value"), [("batch", 0), ("size", -1)])
def test_example_arguments_are_checked(argument: str, value: int) -> None:
    with pytest.raises(InputError, match=argument):
        example_args(nn.Conv2d(3, 4, 3), **{argument: value})


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8], ids=str)
def test_a_batch_or_a_size_alone_keeps_the_rest_of_the_models_own_example(dtype: torch.dtype) -> None:
    model = nn.Identity()
    model.example_input_array = torch.arange(2 * 1 * 5 * 6).view(2, 1, 5, 6).to(dtype)
    (batch,), (size,) = example_args(model, batch=3), example_args(model, size=(4, 7))
    assert (batch.dtype, batch.shape, size.dtype, size.shape) == (dtype, (3, 1, 5, 6), dtype, (2, 1, 4, 7))
    assert example_size(model) == (5, 6)
    if dtype == torch.uint8:  # every number is one of the example's
        assert torch.equal(batch, model.example_input_array[[0, 1, 0]])
        assert torch.equal(size, model.example_input_array[:, :, :4, [0, 1, 2, 3, 4, 5, 0]])
    model.example_input_array = torch.tensor([[1, 2, 3]])  # no image
    assert torch.equal(example_args(model, batch=2)[0], torch.tensor([[1, 2, 3]] * 2))
    assert example_size(model) is None


def test_a_program_for_any_batch_takes_another_batch_of_its_own_size(tmp_path: Path) -> None:
    path, batches = tmp_path / "net.pt2", torch.export.Dim("batch", min=1, max=16)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4 * 6 * 6, 2)).eval()
    torch.export.save(torch.export.export(net, (torch.randn(2, 1, 8, 8),), dynamic_shapes=({0: batches},)), str(path))
    model = load_model(str(path))
    assert model(*example_args(model, batch=5)).shape == (5, 2)


def test_examples_are_the_same_each_time() -> None:
    model = nn.Conv2d(4, 4, 3)
    (a,), (b,) = example_args(model, default_size=12), example_args(model, default_size=12)
    assert torch.equal(a, b)
    assert a.shape == (1, 4, 12, 12)
    assert example_args(nn.Conv3d(3, 4, 3), size=8)[0].shape == (1, 3, 16, 8, 8)


# Saved programs


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "net.pt2"
    torch.export.save(torch.export.export(nn.Conv2d(3, 4, 3).eval(), (torch.randn(1, 3, 8, 8),)), str(path))
    return path


def test_a_saved_program(program: Path) -> None:
    model = load_model(str(program))
    (x,) = example_args(model)
    assert x.shape == (1, 3, 8, 8)
    assert model(x).shape == (1, 4, 6, 6)
    assert model.eval() is model
    model.train(False)  # which an exported module itself refuses
    assert preprocessing(str(program)).size == 224
    for words in ({"weights": "DEFAULT"}, {"num_classes": 3}):
        with pytest.raises(InputError, match="has its own weights and classes"):
            load_model(str(program), **words)
    with pytest.raises(
        InputError, match=r"dtype: got 'fp16', expected fp32, which .* was exported in. Give it: --dtype fp32"
    ):
        load_model(str(program), dtype="fp16")


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float64])
def test_a_saved_program_may_keep_its_own_dtype(tmp_path: Path, kind: torch.dtype) -> None:
    path = str(tmp_path / "net.pt2")
    net = nn.Conv2d(3, 4, 3).eval().to(kind)
    torch.export.save(torch.export.export(net, (torch.randn(1, 3, 8, 8, dtype=kind),)), path)
    model = load_model(path, dtype=None)
    for batch in (None, 1):
        (x,) = example_args(model, batch=batch, dtype=None)
        assert (x.dtype, x.shape) == (kind, (1, 3, 8, 8))
    assert model(x).dtype == kind
    assert own_dtype(model) == {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}[kind]


def test_parameters_of_two_dtypes_and_inputs_of_a_third(tmp_path: Path) -> None:
    """Inputs keep the dtypes of the file's example."""

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 4).bfloat16(), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x.bfloat16()).float())[at]

    path, given = str(tmp_path / "net.pt2"), (torch.randn(2, 3, dtype=torch.float64), torch.tensor([1, 0]))
    torch.export.save(torch.export.export(Mixed().eval(), given), path)
    model = load_model(path, dtype=None)
    args = example_args(model, dtype=None)
    assert [arg.dtype for arg in args] == [torch.float64, torch.int64]
    assert torch.equal(model(*args), model(*given))


def test_a_net_of_the_zoo_without_a_dtype_is_fp32_and_one_without_a_name_is_refused() -> None:
    assert own_dtype(load_model("resnet20_cifar10", dtype=None)) == "fp32"
    assert own_dtype(nn.ReLU()) == "fp32"
    with pytest.raises(InputError, match=r"model: got 'torch.float8_e5m2', expected parameters of one of fp32"):
        own_dtype(nn.ParameterList([nn.Parameter(torch.zeros(2).to(torch.float8_e5m2), requires_grad=False)]))


def test_a_program_that_is_none(tmp_path: Path, program: Path) -> None:
    (tmp_path / "noise.pt2").write_bytes(b"noise")
    (tmp_path / "half.pt2").write_bytes(program.read_bytes()[: program.stat().st_size // 2])
    with zipfile.ZipFile(tmp_path / "empty.pt2", "w"):
        pass
    for name in ("noise", "half", "empty", "absent"):
        with pytest.raises(InputError, match="model: got"):
            load_model(str(tmp_path / f"{name}.pt2"))


class Planted:
    """Unpickling it would make a file: the proof that it was run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (Path.touch, (self.path,))


def repacked(source: Path, to: Path, **replaced: bytes) -> Path:
    """A copy of an archive in which the entries whose names end like this hold something else, or are added."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(to, "w") as new:
        for name in old.namelist():
            key = next((key for key in replaced if name.endswith(key)), None)
            new.writestr(name, replaced.pop(key) if key else old.read(name))
        for name, data in replaced.items():
            new.writestr(f"net/{name}", data)
    return to


def test_a_program_that_holds_code_is_refused_and_not_run(tmp_path: Path, program: Path) -> None:
    mark = tmp_path / "run"
    stream = io.BytesIO()
    torch.save(Planted(mark), stream)
    evil = [
        repacked(program, tmp_path / "a.pt2", **{".pt": stream.getvalue()}),
        repacked(program, tmp_path / "b.pt2", custom_obj_0=pickle.dumps(Planted(mark))),
        repacked(program, tmp_path / "c.pt2", **{"library.so": b"\x7fELF"}),
        repacked(program, tmp_path / "d.pt2", **{"more.json": b'{"expr_str": "__import__(\'os\').getcwd()"}'}),
    ]
    for path in evil:
        with pytest.raises(InputError, match="model: got"):
            load_model(str(path))
    assert not mark.exists()
