"""convoy prune on the command line: what it prints and writes, and bad input, one clear line each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.e2e.command import Command

SMALL = ("prune", "net.py:small", "--trust", "--size", "16")
DATA = ("--finetune", "synthetic:24", "--evaluate", "synthetic:12", "--batch", "8")


def test_a_small_net_from_its_weights_to_a_file_that_loads(convoy_command: Command, folder: Path) -> None:
    out = folder / "pruned.safetensors"
    said = convoy_command.works(*SMALL, "--sparsity", "0.5", *DATA, "--epochs", "2", "--out", out)
    assert "unstructured, layer: 141 of 282 weights are zero (50.00%)" in said
    assert "fine-tuned on 24 images of synthetic:24: loss by epoch" in said
    assert "accuracy on 12 images of synthetic:12: before " in said
    state = load_file(out)
    assert {n: int((t == 0).sum()) for n, t in state.items() if t.dim() > 1} == {
        "first.weight": 108,
        "second.weight": 24,
        "last.weight": 9,
    }
    with safe_open(out, framework="pt") as file:
        about = file.metadata()
    assert {word: about.pop(word) for word in ("model", "pattern", "sparsity", "scope", "accuracy_images")} == {
        "model": "net.py:small",
        "pattern": "unstructured",
        "sparsity": "0.5",
        "scope": "layer",
        "accuracy_images": "12 of synthetic:12",
    }
    assert about.keys() == {"accuracy", "accuracy_before", "size"}
    assert about["size"] == "16x16"
    assert f"fine-tuned {float(about['accuracy']):.2%}" in said
    again = json.loads(convoy_command.works(*SMALL, "--sparsity", "0.6", "--weights", out, "--json"))
    assert [layer["zeros_before"] for layer in again["layers"]] == [108, 24, 9]
    assert again["accuracy"] is None
    told = convoy_command.works("optimize", *SMALL[1:], "--weights", out, "--effort", "none")
    assert (
        "the weights were pruned: pattern unstructured, sparsity 0.5, scope layer; accuracy on 12 of synthetic:12"
        in told
    )
    out.unlink()


def test_json_has_everything(convoy_command: Command) -> None:
    words = (*SMALL, "--pattern", "2:4", "--skip", "last", *DATA, "--epochs", "1", "--seed", "3", "--json")
    found = json.loads(convoy_command.works(*words))
    assert (found["pattern"], found["sparsity"], found["scope"]) == ("2:4", 0.5, "layer")
    assert [layer["reason"] for layer in found["layers"]] == [
        "its 3 input channels a group are no multiple of 4",
        "",
        "skipped, as asked",
    ]
    assert found["accuracy"].keys() == {"data", "images", "before", "pruned", "finetuned"}
    assert (found["finetune"]["seed"], len(found["finetune"]["losses"])) == (3, 1)
    assert found == json.loads(convoy_command.works(*words))


def test_channels_and_nothing_written(convoy_command: Command) -> None:
    said = convoy_command.works(*SMALL, "--pattern", "channel", "--sparsity", "0.5", "--scope", "global")
    assert "its channels are the model's outputs" in said
    assert "nothing is written: give --out FILE.safetensors" in said


def test_advice_where_no_engine_reads_masks(convoy_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convoy.engines.competition.engine_ids", lambda *_: ["aten"])
    assert "no engine reads masks" in convoy_command.works(*SMALL, "--advise")
    assert json.loads(convoy_command.works(*SMALL, "--advise", "--json"))["layers"] == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), "--sparsity: got nothing, expected a share of zeros between 0 and 1"),
        (("--sparsity", "1.0"), "--sparsity: got 1.0"),
        (("--sparsity", "-0.1"), "--sparsity: got -0.1"),
        (("--sparsity", "nan"), "--sparsity: got nan"),
        (("--sparsity", "0.9", "--pattern", "2:4"), "expected 0.5 with pattern 2:4"),
        (("--sparsity", "0.9", "--pattern", "random"), "pattern: got 'random', expected unstructured, channel, N:M"),
        (("--sparsity", "0.9", "--scope", "net"), "--scope: got 'net', expected one of layer, global"),
        (("--sparsity", "0.9", "--skip", "frist"), "--skip: got 'frist'"),
        (("--pattern", "7:9"), "expected a layer that it fits"),
        (("--sparsity", "0.9", "--epochs", "2"), "--epochs: got 2, expected nothing without --finetune DATA"),
        (("--sparsity", "0.9", "--finetune", "synthetic", "--epochs", "0"), "--epochs: got 0"),
        (("--sparsity", "0.9", "--finetune", "synthetic", "--lr", "-1"), "--lr: got -1.0"),
        (("--sparsity", "0.9", "--batch", "0"), "--batch: got 0"),
        (("--sparsity", "0.9", "--finetune", "nobody"), "--finetune: got 'nobody'"),
        (("--sparsity", "0.9", "--finetune", "synthetic", "--images", "0"), "--images: got 0"),
        (
            ("--sparsity", "0.9", "--out", "pruned.pth"),
            "out: got 'pruned.pth', expected a file that ends in .safetensors",
        ),
        (("--sparsity", "0.9", "--out", "no/pruned.safetensors"), "--out: got"),
        (
            ("--sparsity", "0.9", "--weights", "w.safetensors", "--out", "w.safetensors"),
            "another file than --weights",
        ),
        (
            ("--sparsity", "0.9", "--weights", "nan.safetensors"),
            "--weights: got 'second', expected finite numbers alone",
        ),
        (("--advise", "--sparsity", "0.9"), "--sparsity: got '0.9', expected nothing with --advise"),
        (("--advise", "--effort", "none"), "expected quick or full. Advice is measured"),
    ],
)
def test_bad_input(convoy_command: Command, folder: Path, words: tuple[str, ...], expected: str) -> None:
    state = {"first.weight": torch.ones(8, 3, 3, 3), "first.bias": torch.ones(8)}
    state |= {"second.weight": torch.full((6, 8, 1, 1), float("nan")), "second.bias": torch.ones(6)}
    save_file(state | {"last.weight": torch.ones(3, 6), "last.bias": torch.ones(3)}, folder / "nan.safetensors")
    before = sorted(path.name for path in folder.glob("*.safetensors"))
    assert expected in convoy_command.refused(*SMALL, *words)
    assert sorted(path.name for path in folder.glob("*.safetensors")) == before


def test_random_weights_are_refused_by_name(convoy_command: Command) -> None:
    line = convoy_command.refused("prune", "resnet20_cifar10", "--sparsity", "0.5")
    assert "--weights: got nothing, expected a .safetensors file, or DEFAULT" in line
