"""The emitted C under gcc's sanitizers, as a program of its own: no access beyond a buffer, no undefined behaviour.

Sanitizers see C alone: of the segments in assembly, which read where the C does, `test_c` checks every sum.
"""

import shutil
import subprocess
from dataclasses import replace

import pytest

from convoy.engines.compilers import host_compiler
from convoy.engines.sparse_weights.codegen.cpu_blocking import plan, write
from convoy.engines.sparse_weights.codegen.emit_c import emit
from convoy.engines.sparse_weights.codegen.lower_mask import positions
from convoy.engines.sparse_weights.pruned_c import FLAGS
from convoy.measurement.accuracy import make_data, oracle
from convoy.problem import Epilogue, Knobs
from tests.unit.engines.conv_cases import SHAPES
from tests.unit.engines.pruned_cases import pruned

MAIN = """
#include <stdio.h>
#include <stdlib.h>
void convoy_pruned(const float *, const float *, const float *, const float *, float *, float *, int);
static float *filled(const char *name, size_t count)
{
    float *found = malloc(count ? count * sizeof(float) : 1);
    FILE *file = name ? fopen(name, "rb") : 0;
    if (!found || (file && fread(found, sizeof(float), count, file) != count)) exit(3);
    if (file) fclose(file);
    return found;
}
int main(void)
{
    float *x = filled("x", NX), *w = filled("w", NW), *b = filled("b", NB), *r = filled("r", NY), *y = filled(0, NY);
    void *scratch = 0;
    if (posix_memalign(&scratch, 256, SCRATCH)) return 4;
    convoy_pruned(x, w, b, r, y, scratch, 1);
    FILE *file = fopen("y", "wb");
    if (!file || fwrite(y, sizeof(float), NY, file) != NY) return 5;
    fclose(file);
    free(x), free(w), free(b), free(r), free(y), free(scratch);
    return 0;
}
"""


def sanitizers(tmp_path):
    """Flags of the sanitizers that the compiler has; empty: none."""
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    source = tmp_path / "empty.c"
    source.write_text("int main(void) { return 0; }")
    command = [host_compiler.compiler(), *flags, str(source), "-o", str(tmp_path / "empty")]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        return []
    return flags if subprocess.run([tmp_path / "empty"], capture_output=True, check=False).returncode == 0 else []


def run(name, lanes, tmp_path, *, missing=0):
    """Compile and run one layer's code with sanitizers, and `missing` bytes less scratch than it asks for."""
    flags = sanitizers(tmp_path)
    if not flags:
        pytest.skip("the compiler has no sanitizers")
    problem = replace(SHAPES[name], epilogue=Epilogue(bias=True, residual=True, activation="relu"))
    problem = pruned(problem, "half")
    mask = positions(problem.mask)
    made = plan(problem, mask, Knobs.of(filters=3, vectors=2, channels=2, lanes=lanes, threads=1))
    kernel, places = write(problem, mask, made)
    source = emit(kernel, made.layout, bias=True, residual=True, activation="relu")
    data = make_data(problem, 2, "integer")
    tensors = {"x": data.args[0], "w": data.constants[0].view(-1)[places], "b": data.constants[1], "r": data.args[1]}
    for letter, tensor in tensors.items():
        (tmp_path / letter).write_bytes(tensor.contiguous().numpy().tobytes())
    counts = {"NX": tensors["x"].numel(), "NW": len(places), "NB": problem.k, "NY": problem.y_spec.elements}
    defines = [f"-D{key}={value}" for key, value in {**counts, "SCRATCH": source.thread_bytes - missing}.items()]
    for index, unit in enumerate((*source.units, MAIN)):
        (tmp_path / f"u{index}.c").write_text(unit)
    units = [str(path) for path in sorted(tmp_path.glob("u*.c"))]
    strict = [flag for flag in FLAGS if flag != "-O3"]
    command = [host_compiler.compiler(), "-O1", "-g", *strict, *flags, *defines, *units, "-o", "run"]
    subprocess.run(command, cwd=tmp_path, check=True)
    done = subprocess.run(["./run"], cwd=tmp_path, capture_output=True, text=True, check=False)
    return done, oracle(problem, data)[0].float().numpy().tobytes()


@pytest.mark.skipif(not host_compiler.compiler() or not shutil.which("cc"), reason="no C compiler")
@pytest.mark.parametrize("lanes", [4, 8])
@pytest.mark.parametrize("name", ["dilated, strided, grouped", "3x3 over-padded"])
def test_no_access_beyond_a_buffer(name, lanes, tmp_path):
    done, wanted = run(name, lanes, tmp_path)
    assert done.returncode == 0, done.stderr[:2000]
    assert (tmp_path / "y").read_bytes() == wanted


@pytest.mark.skipif(not host_compiler.compiler() or not shutil.which("cc"), reason="no C compiler")
def test_an_access_beyond_a_buffer_would_be_seen(tmp_path):
    """With 256 bytes less than the code asked for."""
    done, _ = run("3x3 over-padded", 4, tmp_path, missing=256)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
