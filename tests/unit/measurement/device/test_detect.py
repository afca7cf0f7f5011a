import pytest
import torch

from convoy.errors import InputError
from convoy.measurement.device import detect
from convoy.measurement.device.detect import check_dtype, cpu_name, detect_target
from convoy.target import Target

H100 = Target("cuda", "NVIDIA H100", "sm_90", 132, 80 << 30, 50 << 20)
V100 = Target("cuda", "Tesla V100", "sm_70", 80, 32 << 30, 6 << 20)


def test_the_cpu_is_described():
    target = detect_target("cpu")
    assert target.device == "cpu"
    assert target.name
    assert target.arch in ("avx512", "avx2", "neon", "generic")
    assert target.units == torch.get_num_threads()
    assert target.memory_bytes > 1 << 28
    assert target.version("torch") == str(torch.__version__)
    assert Target.from_dict(target.to_dict()) == target


def test_the_digest_is_the_same_each_time_and_follows_the_threads():
    before = torch.get_num_threads()
    first = detect_target("cpu")
    assert detect_target("cpu").digest == first.digest
    try:
        torch.set_num_threads(before + 1)
        other = detect_target("cpu")
    finally:
        torch.set_num_threads(before)
    assert other.units == before + 1
    assert other.digest != first.digest


def test_torchs_precision_flags_are_part_of_the_target():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        plain = detect_target("cpu")
        torch.set_float32_matmul_precision("medium")
        other = detect_target("cpu")
    finally:
        torch.set_float32_matmul_precision(before)
    assert plain.version("fp32_matmul") == ""
    assert other.version("fp32_matmul") == "medium"
    assert other.digest != plain.digest


def test_mixed_precision_settings_are_said_to_be_mixed_and_are_different_targets(monkeypatch):
    def refuse():
        raise RuntimeError("mixed")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", refuse)
    plain = detect.precision_flags("cpu")
    assert plain["fp32_precision"].startswith("mixed")
    monkeypatch.setattr(torch.backends.mkldnn.conv, "fp32_precision", "bf16")
    assert detect.precision_flags("cpu") != plain


def test_a_precision_of_convolutions_alone_is_part_of_the_target(monkeypatch):
    plain = detect_target("cpu")
    monkeypatch.setattr(torch.backends.mkldnn.conv, "fp32_precision", "ieee")
    assert detect_target("cpu") == plain
    monkeypatch.setattr(torch.backends.mkldnn.conv, "fp32_precision", "bf16")
    other = detect_target("cpu")
    assert other.version("onednn_conv") == "bf16"
    assert other.digest != plain.digest


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_where_there_is_none_is_refused():
    with pytest.raises(InputError, match="device: got 'cuda', expected a CUDA device, but torch") as caught:
        detect_target("cuda")
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("word", ["gpu", "", "cuda:1", "CPU"])
def test_other_words_are_refused(word):
    with pytest.raises(InputError, match="one of cpu, cuda"):
        detect_target(word)


def test_dtypes_that_the_device_lacks_are_refused():
    for dtype in ("fp32", "fp16", "bf16", "fp64"):
        check_dtype(H100, dtype)
        check_dtype(detect_target("cpu"), dtype)
    check_dtype(V100, "fp16")
    with pytest.raises(InputError, match=r"bf16.*Tesla V100.*Use fp16"):
        check_dtype(V100, "bf16")
    for dtype in ("i8", "float32", ""):
        with pytest.raises(InputError, match="dtype"):
            check_dtype(H100, dtype)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor\t: 0\nmodel name\t: Intel(R)  Xeon 8480C\n\nmodel name\t: other 1", "Intel(R) Xeon 8480C"),
        ("cpu family\t: 25\nmodel\t\t: 17\nmodel name\t: AMD EPYC\nflags\t\t: fpu", "AMD EPYC (family 25 model 17)"),
        ("model name\t: Unnamed\n", "Unnamed"),
        ("processor\t: 0\nCPU part\t: 0xd40\n", ""),
        ("", ""),
    ],
)  # fmt: skip
def test_names_of_processors(text, name):
    assert cpu_name(text) == name


def test_instruction_sets():
    found = {word: detect._cpu_arch(word) for word in ("AVX512", "AVX2", "NEON", "SVE256", "DEFAULT", "NO AVX", "VSX")}
    assert found == {
        "AVX512": "avx512", "AVX2": "avx2", "NEON": "neon", "SVE256": "neon",
        "DEFAULT": "generic", "NO AVX": "generic", "VSX": "generic",
    }  # fmt: skip


def test_the_last_level_cache_is_the_highest_level_that_can_be_read(tmp_path):
    assert detect._last_level_cache_bytes(tmp_path / "absent") == 0
    for index, (level, size) in enumerate(
        [("1", "32K"), ("2", "1024K"), ("3", "32768K\n"), ("4", "nonsense"), ("x", "9K")]
    ):
        (tmp_path / f"index{index}").mkdir()
        (tmp_path / f"index{index}" / "level").write_text(level + "\n")
        (tmp_path / f"index{index}" / "size").write_text(size)
    (tmp_path / "index9").mkdir()
    assert detect._last_level_cache_bytes(tmp_path) == 32768 << 10


def test_versions_of_linked_libraries():
    show = (
        "  - Intel(R) oneAPI Math Kernel Library Version 2024.2-Product\n  - Intel(R) MKL-DNN v3.12.0 (Git Hash 80a)\n"
    )
    assert detect._linked_libraries(show) == {"onednn": "3.12.0", "mkl": "2024.2"}
    assert detect._linked_libraries("nothing") == {}


def test_cudnn_numbers():
    assert [detect._dotted(v) for v in (91900, 90100, 8907, None)] == ["9.19.0", "9.1.0", "8.9.7", ""]


def test_installed():
    assert detect.installed("torch").partition("+")[0] == torch.__version__.partition("+")[0]
    assert detect.installed("no-such-distribution-1") == ""
