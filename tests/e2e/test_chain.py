"""The first hour in little: from a folder of images to a pruned, optimised net, with PyTorch's and Convoy's accuracies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

from tests.e2e.command import Command, Done
from tests.unit.zoo.image_folders import add_odd_files, draw_folder

NET = '''
"""A net for ten classes: two convolutions with batch norm and ReLU, a linear layer."""

import torch
from torch import nn


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
    )
'''
MODEL = ("chain.py:net", "--trust", "--device", "cpu")


@pytest.fixture
def shapes(folder: Path) -> Path:
    """Class folders in the commands' folder, and in them every kind of file that users have."""
    (folder / "chain.py").write_text(NET, encoding="utf-8")
    path = folder / "shapes"
    if not path.exists():
        add_odd_files(draw_folder(path))
    return path


def works(done: Done) -> list[str]:
    assert done.code == 0, done.err
    return done.out.splitlines()


def test_from_a_folder_of_images_to_both_accuracies(convoy_command: Command, shapes: Path, folder: Path) -> None:
    words = ("--data", "shapes", "--size", "20", "--epochs", "4", "--lr", "0.05", "--stock")
    trained = convoy_command("train", *MODEL, *words, "--checkpoint", "net.checkpoint", "--out", "net.safetensors")
    lines = works(trained)
    assert lines[:3] == [
        "59 training and 6 test images, 3 classes (circle, square, triangle)",
        "the last layer, 8, is new: 3 outputs, one for each class (it had 10; --head keep leaves it)",
        "4 images a step, 14 steps an epoch, learning rate 0.05",
    ]
    assert [line.split(":")[0] for line in lines[3:]] == [f"epoch {n} of 4" for n in range(1, 5)] + ["weights"]
    assert trained.err.count("left out, for it cannot be read: shapes/") == 2
    with safe_open(folder / "net.safetensors", framework="np") as file:
        assert file.metadata()["classes"] == '["circle", "square", "triangle"]'

    # The checkpoint serves as weights too.
    pruning = ("--sparsity", "0.5", "--finetune", "shapes", "--lr", "0.02", "--epochs", "2")
    pruned = works(
        convoy_command("prune", *MODEL, "--weights", "net.checkpoint", *pruning, "--out", "pruned.safetensors")
    )
    assert any(line.startswith("accuracy on 6 images of shapes: before 100.00%") for line in pruned)

    tuning = ("--weights", "pruned.safetensors", "--plan", "net.plan.json")
    tuned = convoy_command("optimize", *MODEL, *tuning, "--input", "shapes", "--effort", "none", "--report", "net.html")
    assert "fp32[1,3,20,20]" in "".join(works(tuned))
    assert "the weights were pruned" in (folder / "net.html").read_text(encoding="utf-8")

    lines = works(convoy_command("run", *MODEL, *tuning, "--data", "shapes"))
    files = [line.split("  ") for line in lines[:6]]
    assert [name for name, *_ in files] == [f"shapes/{c}/{i:02}.png" for c in CLASSES for i in (9, 19)]
    assert [title for _, title, _ in files] == [c for c in CLASSES for _ in range(2)]
    assert lines[6].startswith("6 images of shapes (every tenth image of each class; the weights were trained on")
    table = {line.split()[0]: line.split()[1:] for line in lines[7:-1] if line.strip()}
    assert table["PyTorch"][:4] == ["100.00%", "6", "of", "6"]
    assert table["Convoy"][:4] == ["100.00%", "6", "of", "6"]
    assert lines[-1] == "PyTorch and Convoy give the same class for 6 of 6 images"

    # Without labels, and all images, among them those that were trained on.
    flat = works(convoy_command("run", *MODEL, *tuning, "--data", "shapes/square"))
    assert "shapes/square/四角.png  square" in "\n".join(flat)
    everything = works(convoy_command("run", *MODEL, *tuning, "--data", "shapes", "--split", "all"))
    assert any(line.startswith("65 images of shapes (the weights were trained on them)") for line in everything)
    found = json.loads("".join(works(convoy_command("run", *MODEL, *tuning, "--data", "shapes", "--json"))))
    assert [found[name] for name in ("labelled", "stock_right", "convoy_right", "same_class")] == [6, 6, 6, 6]
    assert [image["class_name"] for image in found["images"]] == [c for c in CLASSES for _ in range(2)]
    assert [image["label"] for image in found["images"]] == [0, 0, 1, 1, 2, 2]


CLASSES = ("circle", "square", "triangle")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--data", "shapes", "--input", "shapes"), "nothing with --data"),
        (("--split", "all"), "nothing without --data"),
        (("--data", "shapes", "--split", "half"), "expected one of test, train, all"),
    ],
)
def test_words_of_run_that_do_not_go_together(
    convoy_command: Command, shapes: Path, words: tuple[str, ...], says: str
) -> None:
    assert says in convoy_command.refused("run", *MODEL, "--plan", "nowhere.plan.json", *words)


def test_the_images_that_are_trained_on_are_not_counted(convoy_command: Command, shapes: Path) -> None:
    words = (
        "prune",
        "chain.py:net",
        "--trust",
        "--device",
        "cpu",
        "--size",
        "20",
        "--sparsity",
        "0.5",
        "--epochs",
        "1",
    )
    same = works(convoy_command(*words, "--finetune", "shapes", "--evaluate", "./shapes/"))
    assert any(line.startswith("accuracy on 6 images of ./shapes/") for line in same)
    inside = convoy_command(*words, "--finetune", "shapes", "--evaluate", "linked")
    assert inside.code == 2  # there is no such folder yet
    (shapes.parent / "linked").symlink_to(shapes)
    linked = works(convoy_command(*words, "--finetune", "shapes", "--evaluate", "linked"))
    assert any(line.startswith("accuracy on 6 images of linked") for line in linked)
    (shapes.parent / "linked").unlink()


def test_a_resumed_training_follows_what_is_asked_for_now(convoy_command: Command, shapes: Path) -> None:
    words = ("train", *MODEL, "--data", "shapes", "--size", "20", "--stock", "--checkpoint", "resumed.checkpoint")
    works(convoy_command(*words, "--epochs", "2", "--lr", "0.1"))
    lines = works(convoy_command(*words, "--resume", "--epochs", "4", "--lr", "0.01"))
    assert "resumes at epoch 3 of 4, step 0 of 14: 4 images a step, 14 steps an epoch, learning rate 0.005" in lines
    rates = [float(line.split("  lr ")[1].split()[0]) for line in lines if line.startswith("epoch")]
    assert len(rates) == 2
    assert 0.005 > rates[0] > rates[1] > 0
    assert "7 of 4 epochs" not in "".join(lines)
    done = works(convoy_command(*words, "--resume", "--epochs", "4"))
    assert any(line.startswith("4 of 4 epochs are done; nothing is left to train") for line in done)
