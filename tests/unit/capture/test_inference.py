"""capture_inference: the graph computes what the model computes, whatever the model's shape; and what it cannot do it says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from convoy.capture import Captured, capture_inference, captured_function, to_double
from convoy.capture.draft import Draft
from convoy.capture.structure_data import structure_data, structure_from_data
from convoy.errors import CaptureError, InputError
from convoy.graph.text import digest, parse_graph, print_graph
from convoy.graph.verify import verify
from convoy.zoo import load_model


def randomised(model: nn.Module) -> nn.Module:
    """Statistics and scales away from 0 and 1, so that a batch norm left out or folded wrongly shows."""
    generator = torch.Generator().manual_seed(5)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.uniform_(-0.3, 0.3, generator=generator)
            module.running_var.uniform_(0.5, 2.0, generator=generator)
            if module.affine:
                nn.init.uniform_(module.weight, 0.5, 1.5, generator=generator)
                nn.init.uniform_(module.bias, -0.3, 0.3, generator=generator)
    return model


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative L2 error; absolute where all is zero."""
    found, wanted = found.detach().double(), wanted.detach().double()
    return float((found - wanted).norm() / (wanted.norm() or 1.0))


def check(model: nn.Module, *args: Any, limit: float = 1e-5, **kwargs: Any) -> Captured:
    """Capture, and compare with the model in every memory format."""
    captured = capture_inference(model, args, kwargs)
    verify(captured.graph)
    assert parse_graph(print_graph(captured.graph)) == captured.graph
    assert list(captured.constants) == [value.name for value in captured.graph.constants()]
    assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in captured.constants.values())
    function = captured_function(captured)
    model.eval()
    with torch.no_grad():
        wanted = model(*args, **kwargs)
        found = function(*args, **kwargs)
        nhwc = function(*map(channels_last, args), **{name: channels_last(value) for name, value in kwargs.items()})
    compare(found, wanted, limit)
    compare(nhwc, wanted, limit)
    return captured


def channels_last(value: Any) -> Any:
    is_image = isinstance(value, torch.Tensor) and value.dim() == 4
    return value.contiguous(memory_format=torch.channels_last) if is_image else value


def compare(found: Any, wanted: Any, limit: float) -> None:
    assert type(found) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        assert relative(found, wanted) <= limit if wanted.is_floating_point() else torch.equal(found, wanted)
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for name, value in wanted.items():
            compare(found[name], value, limit)
    elif isinstance(wanted, (tuple, list)):
        assert len(found) == len(wanted)
        for have, want in zip(found, wanted, strict=True):
            compare(have, want, limit)
    else:
        assert found == wanted


def image(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)


class Net(nn.Module):
    """A model made of a function and parts."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)
        self._forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(self, *args, **kwargs)


# ---- whole nets


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("resnet18", 32),
        ("squeezenet1_1", 32),
        ("shufflenet_v2_x0_5", 32),
        ("mobilenet_v3_small", 32),
        ("timm:convnext_atto", 32),
    ],
)
def test_a_net_of_the_zoo(name: str, size: int):
    captured = check(randomised(load_model(name)), image(2, 3, size, size))
    ops = {node.op for node in captured.graph.nodes}
    assert "conv2d" in ops
    assert not ops & {"aten.conv2d.default", "aten.batch_norm.default", "aten.dropout.default", "aten.clone.default"}
    assert captured.notes == ()


def test_a_net_keeps_its_names():
    graph = capture_inference(load_model("resnet18"), (image(1, 3, 32, 32),)).graph
    names = [node.name for node in graph.nodes]
    assert names[:3] == ["conv1", "relu", "maxpool"]
    assert {"layer1.0.conv1", "layer1.0.relu", "layer1.0.relu_1", "layer1.0.add", "layer2.0.downsample.0", "fc"} <= set(
        names
    )
    assert {"conv1.weight.folded", "layer4.1.conv2.bias.folded", "fc.weight"} <= set(graph.values)
    assert all(node.name == node.outputs[0] for node in graph.nodes)


# ---- the caller's model


def test_training_flags_come_back_each_as_it_was():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout())
    model[1].eval()
    before = [module.training for module in model.modules()]
    check(model.train(), image(2, 3, 8, 8))
    model.train()
    model[1].eval()
    capture_inference(model, (image(2, 3, 8, 8),))
    assert [module.training for module in model.modules()] == before
    model[1].weight = None
    with pytest.raises(CaptureError):
        capture_inference(model, (image(2, 5, 8, 8),))
    assert [module.training for module in model.modules()] == before


def test_capture_changes_no_parameter_and_shares_memory():
    model = randomised(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1)))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    captured = check(model, image(2, 3, 8, 8))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert captured.constants["2.weight"].data_ptr() == model[2].weight.data_ptr()


def test_a_channels_last_model_gives_contiguous_constants():
    model = nn.Sequential(nn.Conv2d(3, 4, 3)).to(memory_format=torch.channels_last)
    assert check(model, image(1, 3, 8, 8)).constants["0.weight"].is_contiguous()


def test_equal_models_have_equal_digests():
    args = (image(1, 3, 8, 8),)
    first, second = (capture_inference(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), args).graph for _ in range(2))
    assert digest(first) == digest(second)
    other = capture_inference(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU6()), args).graph
    assert digest(first) != digest(other)


# ---- arguments and results of every shape


def test_several_inputs_and_nested_outputs():
    def forward(net: Net, x: torch.Tensor, scale: float, *, pair: dict[str, torch.Tensor], flag: bool = True) -> Any:
        y = net.conv(x) * scale + pair["b"]
        return {"y": y if flag else x, "rest": (x, None, 3, [pair["a"]], "word")}, torch.zeros(2)

    pair = {"a": image(2, 2), "b": image(1, 4, 8, 8)}
    captured = check(Net(forward, conv=nn.Conv2d(3, 4, 3, padding=1)), image(1, 3, 8, 8), 2.0, pair=pair, flag=True)
    function = captured_function(captured)
    swapped = {"b": pair["b"], "a": pair["a"]}
    compare(
        function(image(1, 3, 8, 8), 2.0, flag=True, pair=swapped),
        function(image(1, 3, 8, 8), 2.0, pair=pair, flag=True),
        0,
    )


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((image(1, 3, 8, 8), 3.0), {"flag": None}),
        ((image(1, 3, 8, 8), 2), {"flag": None}),
        ((image(1, 3, 8, 8), 2.0), {"flag": 0}),
        ((image(1, 3, 8, 8), 2.0), {"other": None}),
        ((image(1, 3, 8, 8), 2.0, None), {}),
        ((image(1, 3, 8, 9), 2.0), {"flag": None}),
        ((image(1, 3, 8, 8, dtype=torch.float64), 2.0), {"flag": None}),
        ((4, 2.0), {"flag": None}),
        (([image(1, 3, 8, 8)], 2.0), {"flag": None}),
    ],
)
def test_other_arguments_than_at_capture_are_refused(args: tuple[Any, ...], kwargs: dict[str, Any]):
    def forward(_: Net, x: torch.Tensor, scale: float, *, flag: Any) -> torch.Tensor:
        return x * scale if flag is None else x

    function = captured_function(check(Net(forward), image(1, 3, 8, 8), 2.0, flag=None))
    with pytest.raises(InputError):
        function(*args, **kwargs)


def test_plain_tensor_arguments_are_checked_too():
    captured = check(nn.Conv2d(3, 4, 3), image(1, 3, 8, 8))
    for wrong in ((), (image(1, 3, 8, 8),) * 2, (3,), (image(2, 3, 8, 8),), (image(1, 3, 8, 8).half(),)):
        with pytest.raises(InputError):
            captured.flatten_inputs(wrong)
    assert captured.flatten_inputs((image(1, 3, 8, 8),))[0].shape == (1, 3, 8, 8)


def test_a_size_that_is_returned_stays_a_size():
    """PyTorch's exporter, and its pytrees, give a plain tuple in place of a `torch.Size`, which has `numel`."""

    class Sizes(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x.shape, {"of images": x.shape[2:], "none": x[0, 0, 0, 0].shape}, x + 1, x.size(0)

    x = torch.randn(2, 3, 4, 5)
    captured = capture_inference(Sizes(), (x,))
    found, wanted = captured.results.unflatten([x + 1]), Sizes()(x)
    assert found[:2] == wanted[:2]
    assert [type(size) for size in (found[0], *found[1].values())] == [torch.Size] * 3
    assert found[3] == 2
    again = structure_from_data(structure_data(captured.results, "results"), "results")  # a file has tuples
    assert again.unflatten([x + 1])[:2] == wanted[:2]


def test_an_input_returned_unchanged_is_the_input():
    model = Net(lambda net, x: (x, net.conv(x)), conv=nn.Conv2d(3, 4, 3))
    captured = check(model, image(1, 3, 8, 8))
    x = image(1, 3, 8, 8)
    assert captured_function(captured)(x)[0] is x


def test_a_copy_of_an_input_is_no_view_of_it():
    captured = check(Net(lambda _, x: (x.clone(), x.relu())), image(1, 3, 8, 8))
    x = image(1, 3, 8, 8)
    assert captured_function(captured)(x)[0].data_ptr() != x.data_ptr()


def test_a_returned_buffer_is_a_copy():
    model = Net(lambda net, x: (x + 1, net.table), table=torch.arange(4.0))
    function = captured_function(check(model, image(2)))
    function(image(2))[1].zero_()
    assert torch.equal(function(image(2))[1], torch.arange(4.0))
    assert torch.equal(model.table, torch.arange(4.0))


def test_an_input_that_the_model_overwrites_is_told():
    captured = capture_inference(nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(3, 4, 3)), (image(1, 3, 8, 8),))
    assert captured.notes == ("the model overwrites its argument input; the optimised model does not",)
    x = image(1, 3, 8, 8)
    captured_function(captured)(x)
    assert torch.equal(x, image(1, 3, 8, 8))


# ---- what models do


def test_a_module_used_twice_shares_its_weight():
    model = Net(lambda net, x: net.conv(net.conv(x)), conv=nn.Conv2d(3, 3, 3))
    captured = check(model, image(1, 3, 8, 8))
    assert list(captured.constants) == ["conv.weight", "conv.bias"]
    assert [node.name for node in captured.graph.nodes] == ["conv", "conv_1"]


def test_a_weight_with_two_names_is_kept_once():
    first, second = nn.Conv2d(3, 3, 3, bias=False), nn.Conv2d(3, 3, 3, bias=False)
    second.weight = first.weight
    assert list(check(nn.Sequential(first, second), image(1, 3, 8, 8)).constants) == ["0.weight"]


def test_a_shared_convolution_before_two_batch_norms_is_folded_for_each():
    model = Net(
        lambda net, x: net.one(net.conv(x)) + net.two(net.conv(x)),
        conv=nn.Conv2d(3, 4, 3),
        one=nn.BatchNorm2d(4),
        two=nn.BatchNorm2d(4),
    )
    captured = check(randomised(model), image(2, 3, 8, 8))
    assert [node.op for node in captured.graph.nodes] == ["conv2d", "conv2d", "aten.add.Tensor"]
    assert len(captured.constants) == 4


def test_batch_norms_before_and_after_layers():
    model = nn.Sequential(
        nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False), nn.Flatten(),
        nn.Linear(144, 5), nn.BatchNorm1d(5),
    )  # fmt: skip
    captured = check(randomised(model), image(2, 3, 8, 8))
    assert [node.op for node in captured.graph.nodes] == [
        "aten.addcmul.default", "aten.relu.default", "conv2d", "aten.view.default", "linear",
    ]  # fmt: skip


def test_a_batch_norm_with_large_mean_is_about_as_exact_as_torch():
    model = nn.Sequential(nn.ReLU(), nn.BatchNorm2d(8))
    nn.init.constant_(model[1].running_mean, 1000.0)
    nn.init.constant_(model[1].running_var, 1e-2)
    x = image(2, 8, 16, 16) + 1000
    captured = capture_inference(model, (x,))
    with torch.no_grad():
        theirs = model.eval()(x)
        exact = model.double()(x.double())
    assert relative(captured_function(captured)(x), exact) <= 2 * relative(
        theirs, exact
    )  # two roundings instead of one


@pytest.mark.parametrize(
    "forward",
    [
        lambda _, x: x.transpose(1, 2).reshape(2, -1),
        lambda _, x: x.view(2, 2, 2, 6, 6).transpose(1, 2).contiguous().view(2, 4, 6, 6),
        lambda _, x: torch.cat([part.relu() for part in x.chunk(2, 1)] + [x[:, 1:3, ::2, 1:].mean() * x], 1),
        lambda _, x: x.mul(2).add_(1).relu_().clamp_(0, 3),
        lambda _, x: F.interpolate(x, scale_factor=2, mode="bilinear") + F.interpolate(x, size=(12, 12)),
        lambda _, x: F.pad(x, (1, 2, 0, 1), mode="reflect"),
        lambda _, x: F.max_pool2d(x, 2, return_indices=True),
        lambda _, x: (x.softmax(1), x.topk(2, 1), x.argmax(1), x > 0),
        lambda _, x: F.scaled_dot_product_attention(x, x, x),
        lambda _, x: F.conv_transpose2d(x, torch.ones(4, 2, 3, 3), stride=2, output_padding=1),
        lambda _, x: x + torch.arange(6, device=x.device) + x.new_zeros(6) + torch.tensor([1.0]),
        lambda _, x: x.half().float() + x.to(torch.float64).float(),
        lambda _, x: torch.einsum("nchw,ndhw->ncd", x, x),
        lambda _, x: F.conv2d(x, x[:2, :, :3, :3]),
        lambda _, x: x.permute(0, 2, 3, 1).flatten(1, 2) @ torch.ones(4, 3),
    ],
)  # fmt: skip
def test_what_stays_an_operator(forward: Callable[..., Any]):
    check(Net(forward), image(2, 4, 6, 6))


def test_writing_to_a_part_of_a_value():
    def forward(_: Net, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[:, 0] = 3
        y[:, 1:, ::2] += 1
        return y

    check(Net(forward), image(2, 4, 6, 6))


def test_convolutions_of_every_kind():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
        nn.Conv2d(8, 8, 3, padding="same", groups=8),
        nn.Conv2d(8, 8, (1, 3), padding=(0, 2), dilation=(1, 2), groups=2),
        nn.Conv2d(8, 8, 2, padding="same"),
        nn.ZeroPad2d(1),
        nn.Conv2d(8, 4, 3),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
        nn.ConvTranspose2d(4, 4, 2, stride=2),
    )
    graph = check(model, image(2, 3, 16, 16)).graph
    ops = [node.op for node in graph.nodes]
    assert ops.count("conv2d") == 6
    assert ops.count("conv2d_dgrad") == 1
    assert graph.node("5").args[4] == (1, 1)


def test_standardised_weights_are_computed_once():
    def forward(net: Net, x: torch.Tensor) -> torch.Tensor:
        mean = net.conv.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, (net.conv.weight - mean) / net.conv.weight.std((1, 2, 3), keepdim=True), net.conv.bias)

    captured = check(Net(forward, conv=nn.Conv2d(3, 4, 3)), image(1, 3, 8, 8))
    assert [node.op for node in captured.graph.nodes] == ["conv2d"]


def test_parametrised_weights():
    layer = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3))
    assert [node.op for node in check(nn.Sequential(layer), image(1, 3, 8, 8)).graph.nodes] == ["conv2d"]


def test_autocast_and_grad_modes_inside_a_model():
    def forward(net: Net, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = net.conv(x)
        with torch.enable_grad():
            return net.last(y.float())

    graph = check(Net(forward, conv=nn.Conv2d(3, 4, 3), last=nn.Conv2d(4, 4, 1)), image(1, 3, 8, 8), limit=0.01).graph
    assert [node.op for node in graph.nodes if node.op == "conv2d"] == ["conv2d", "conv2d"]
    assert graph.values["conv"].spec.dtype == "bf16"


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-13), (torch.float32, 1e-5), (torch.bfloat16, 0.02), (torch.float16, 2e-3)]
)
def test_every_dtype(dtype: torch.dtype, limit: float):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 4, 1), nn.Flatten()
    )
    check(randomised(model).to(dtype), image(2, 3, 8, 8, dtype=dtype), limit=limit)


def test_an_empty_batch_and_a_batch_of_one():
    for batch in (0, 1):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2))
        captured = capture_inference(model, (image(batch, 3, 8, 8),))
        assert captured_function(captured)(image(batch, 3, 8, 8)).shape == (batch, 2)


def test_odd_module_names_become_words():
    model = nn.Module()
    model.add_module("a conv/é", nn.Conv2d(3, 4, 1))
    model.add_module("_", nn.Conv2d(4, 4, 1))
    model.forward = lambda x: model.get_submodule("_")(model.get_submodule("a conv/é")(x))
    graph = check(model, image(1, 3, 8, 8)).graph
    assert graph.nodes[0].name == "a_conv__"


def test_a_loaded_export_can_be_captured(tmp_path):
    model = randomised(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())).eval()
    x = image(2, 3, 8, 8)
    torch.export.save(torch.export.export(model, (x,)), tmp_path / "net.pt2")
    loaded = torch.export.load(tmp_path / "net.pt2").module()
    compare(captured_function(capture_inference(loaded, (x,)))(x), model(x).detach(), 1e-6)


# ---- the oracle


def test_to_double_computes_in_float64_throughout():
    def forward(net: Net, x: torch.Tensor) -> Any:
        return net.bn(net.conv(x).half().float()) * torch.ones(1), x.argmax(1)

    model = randomised(Net(forward, conv=nn.Conv2d(3, 4, 3), bn=nn.BatchNorm2d(4))).eval()
    x = image(2, 3, 8, 8)
    values, where = captured_function(to_double(capture_inference(model, (x,))))(x)
    exact = model.double()
    exact._forward = lambda net, x: net.bn(net.conv(x))
    assert values.dtype == torch.float64
    assert where.dtype == torch.int64
    assert relative(values, exact(x.double())) < 1e-7


# ---- what cannot be captured


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu() if x.sum() > 0 else x.neg()


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            Branches(),
            r"exported: values of a tensor decide what runs, as with .*\(GuardOnDataDependentSymNode: Could not",
        ),
        (Counts(), "changes calls when it is called"),
        (Net(lambda _, x: x[x > 0]), "depends on data"),
        (Net(lambda _, x: x.as_strided((2, 2), (1, 2)) * 1), "strides"),
        (Net(lambda _, x: torch.fft.fft(x)), "complex64"),
        (Net(lambda _, x: torch.conv2d(x, torch.ones(1))), "cannot be exported"),
        (Net(lambda _, x: x.nothing()), "nothing"),
    ],
    ids=["branch", "buffer", "shape", "strides", "complex", "error", "attribute"],
)
def test_what_cannot_be_captured_is_said(model: nn.Module, words: str):
    with pytest.raises(CaptureError, match=words):
        capture_inference(model, (image(1, 3, 8, 8),))


def test_arguments_must_be_a_tuple():
    with pytest.raises(CaptureError, match="expected a tuple"):
        capture_inference(nn.ReLU(), image(2))  # pyright: ignore[reportArgumentType]


def test_a_pass_that_breaks_a_rule_is_no_error_of_an_argument(monkeypatch: pytest.MonkeyPatch):
    """`convoy.optimize` then runs the model's parts, or PyTorch, with a warning that names the rule."""

    def broken(draft: Draft) -> None:
        draft.nodes[0] = dataclasses.replace(draft.nodes[0], op="nonsense")

    monkeypatch.setattr("convoy.capture.inference.PASSES", (broken,))
    with pytest.raises(CaptureError, match=r"the captured graph, rule '\w+'.*This is a fault of Convoy"):
        capture_inference(torch.nn.ReLU(), (torch.ones(2),))
