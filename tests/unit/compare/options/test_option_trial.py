"""Settings of PyTorch's options on a tiny net, in this process: right ones pass, wrong ones are seen, switches go back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from convoy.compare import case_inputs as material
from convoy.compare import rounding_limits
from convoy.compare.case import Case
from convoy.compare.case_inputs import make, read
from convoy.compare.child_failure import WrongResultError
from convoy.compare.frameworks.base import CaseInputs
from convoy.compare.frameworks.torch_model import load_net
from convoy.compare.options import option_trial
from convoy.compare.options.data_loader import StoredImages
from convoy.compare.options.option_trial import ModelVariant, facts, rounds
from convoy.compare.options.torch_options import OPTIONS

PLANTED = Path(__file__).parents[1] / "planted_frameworks.py"


def case(mode: str) -> Case:
    return Case(f"{PLANTED}:tiny", batch=2, size=16, mode=mode, threads=torch.get_num_threads(), trust=True)


@pytest.fixture(autouse=True)
def switches() -> Iterator[None]:
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)
    torch.backends.cudnn.benchmark = benchmark


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CaseInputs]:
    found: dict[str, CaseInputs] = {}
    for mode in ("inference", "training"):
        folder = tmp_path_factory.mktemp(mode)
        make(case(mode), folder)
        found[mode] = read(folder)
    return found


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("inference", ()),
        ("inference", ("inference_mode", "channels_last", "fuse_conv_bn")),
        ("inference", ("no_grad", "-onednn", "flush_denormal")),
        ("training", ()),
        ("training", ("channels_last", "fused_optimizer", "-set_to_none")),
        ("training", ("foreach_optimizer", "-no_first_data_gradient")),
        ("training", ("-bias_gradient",)),
    ],
)
def test_a_setting_gives_the_right_numbers(
    materials: dict[str, CaseInputs], mode: str, options: tuple[str, ...]
) -> None:
    variant = ModelVariant(case(mode), materials[mode], frozenset(options), {})
    prepared = variant.prepare()
    assert prepared["error"] < 1e-5
    assert prepared["call_s"] > 0


def test_half_types_are_checked_more_loosely_and_wrong_ones_are_seen(materials: dict[str, CaseInputs]) -> None:
    variant = ModelVariant(case("inference"), materials["inference"], frozenset({"autocast_bf16"}), {})
    assert 1e-6 < variant.prepare()["error"] < 0.1
    variant._check = lambda: {"out0": materials["inference"].exact()["out0"] * 1.2}
    with pytest.raises(WrongResultError, match="relative L2 error"):
        variant.prepare()


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_net_that_rounding_hardly_moves_is_held_to_the_least(materials: dict[str, CaseInputs], mode: str) -> None:
    effects = rounding_limits._effects(case(mode), materials[mode], "bf16")
    assert all(0 < effect < 0.05 for effect in effects.values())
    assert rounding_limits.half_limits(case(mode), materials[mode], "bf16") == {
        name: rounding_limits.LEAST[name] for name in effects
    }
    exact = rounding_limits._effects(case(mode), materials[mode], "fp32")
    assert max(exact.values()) < 1e-5  # the same net, unrounded


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_one_rounding_explains_an_error_that_stock_pytorch_need_not_have(
    materials: dict[str, CaseInputs], mode: str
) -> None:
    exact = materials[mode].exact()
    net = load_net(case(mode), materials[mode], keep_memory=False)
    before = [tensor.clone() for tensor in (*net.model.parameters(), *net.model.buffers(), net.x)]
    explained = rounding_limits.rounding_limits(case(mode), net, exact)
    assert set(explained) == ({"out"} if mode == "inference" else {"grad", "loss"})
    assert all(0 < limit < 1e-4 for limit in explained.values())
    coarse = rounding_limits.rounding_limits(dataclasses.replace(case(mode), dtype="bf16"), net, exact)
    name = next(iter(explained))
    assert coarse[name] > 100 * explained[name]
    after = (*net.model.parameters(), *net.model.buffers(), net.x)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_step_may_be_as_far_off_as_rounding_explains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(material, "rounding_limits", lambda *_: {"grad": 0.02, "loss": 0.03, "out": 0.04})
    for mode, wanted in (("training", {"grad": 0.02, "loss": 0.03}), ("inference", {"out": 0.04})):
        (tmp_path / mode).mkdir()
        made = material.make(case(mode), tmp_path / mode)
        assert made["limits"] == wanted


@pytest.mark.parametrize(
    ("effects", "limits"),
    [
        ({"out": 0.15}, {"out": 0.45}),
        ({"out": 0.5}, {"out": rounding_limits.MOST}),
        ({"grad": 1.1, "loss": 0.02}, {"grad": 3.3, "loss": 0.2}),
        ({"grad": 0.1, "loss": 0.2}, {"grad": 0.5, "loss": rounding_limits.MOST}),
    ],
)
def test_what_rounding_moves_is_allowed_to_half_types(
    materials: dict[str, CaseInputs],
    monkeypatch: pytest.MonkeyPatch,
    effects: dict[str, float],
    limits: dict[str, float],
) -> None:
    asked: list[str] = []

    def measured(case: Case, material: CaseInputs, dtype: str) -> dict[str, float]:
        asked.append(dtype)
        return effects

    monkeypatch.setattr(rounding_limits, "_effects", measured)
    mode = "inference" if "out" in effects else "training"
    kept: dict[str, dict[str, float]] = {}
    for _ in range(2):
        variant = ModelVariant(case(mode), materials[mode], frozenset({"autocast_bf16"}), kept)
        variant.prepare()
    assert asked == ["bf16"]
    assert kept == {"bf16": pytest.approx(limits)}


def test_settings_are_timed_in_turn_and_switches_are_theirs_alone(materials: dict[str, CaseInputs]) -> None:
    seen: list[tuple[str, bool]] = []
    variants = [
        ModelVariant(case("inference"), materials["inference"], frozenset(o), {}) for o in ((), ("inference_mode",))
    ]
    for name, variant in zip("ab", variants, strict=True):
        inner = variant._run

        def run(name: str = name, inner: Any = inner) -> Any:
            seen.append((name, torch.is_inference_mode_enabled()))
            return inner()

        variant._run = run
    found = rounds(variants, 2)
    assert [len(samples) for samples in found] == [2, 2]
    assert set(seen) == {("a", False), ("b", True)}
    order = "".join(name for name, _ in seen).replace("aa", "a")
    assert order.index("a") < order.index("b") < order.rindex("a")


def test_a_step_fed_by_a_loader(materials: dict[str, CaseInputs], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convoy.compare.options.data_loader.LOADED_S", 0.05)
    variant = ModelVariant(case("training"), materials["training"], frozenset(), {})
    assert all(ms > 0 for ms in variant.fed_by(0))
    picture, label = StoredImages(10, 16)[3]
    assert picture.shape == (3, 16, 16)
    assert picture.dtype == torch.float32
    assert int(label) in (0, 1)


def test_what_the_device_has() -> None:
    found = facts(case("inference"))
    assert set(found) == {"threads", "more_cores", "bf16", "compiler"}
    assert all(value is True or isinstance(value, str) for value in found.values())


def test_every_option_that_compiles_names_its_mode_and_frozen_ones_are_for_inference():
    compiling = {option.id for option in OPTIONS.values() if option.compiles}
    assert compiling == set(option_trial._COMPILE)
    assert {name for name in compiling if "freezing" in name} == option_trial._FROZEN
    assert all(OPTIONS[name].modes == ("inference",) for name in option_trial._FROZEN)
