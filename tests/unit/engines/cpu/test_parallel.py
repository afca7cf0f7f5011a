"""parallel.h: every item of a loop is done once, and who has done its share takes from a thread that is late."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from convoy.engines.cpu.native_launch import PARALLEL_H

PROGRAM = r"""
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

NOT_INLINED void count_once(int *times, int64_t item) { __atomic_fetch_add(times + item, 1, __ATOMIC_RELAXED); }

static int done_once(int64_t items, int64_t threads) {
    int *times = calloc((size_t)items + 1, sizeof *times), right = 1;
    PARALLEL_FOR(item, items, threads) count_once(times, item);
    for (int64_t i = 0; i < items; i++) right &= times[i] == 1;
    MEET();
    EACH_ITEM(item, items, threads, count_once(times, item));
    for (int64_t i = 0; i < items; i++) right &= times[i] == 2;
    right &= times[items] == 0;
    free(times);
    return right;
}

/* Whether all other items are done while the one who has the first waits for that, for some seconds at most. */
static int first_is_late(int64_t items, int64_t threads) {
    int64_t done = 0;
    int all = 0;
    PARALLEL_FOR(item, items, threads) {
        time_t end = time(NULL) + 20;
        while (item == 0 && !all && time(NULL) < end) all = __atomic_load_n(&done, __ATOMIC_RELAXED) == items - 1;
        __atomic_fetch_add(&done, 1, __ATOMIC_RELAXED);
    }
    return all;
}

int main(void) {
    const int64_t items[] = {0, 1, 2, 5, 31, 32, 33, 100, 1000, 100003}, threads[] = {0, 1, 2, 3, 7, 64, 70};
    for (size_t i = 0; i < sizeof items / sizeof *items; i++)
        for (size_t t = 0; t < sizeof threads / sizeof *threads; t++)
            if (!done_once(items[i], threads[t] < 1 ? 1 : threads[t])) return 1 + (int)(10 * i + t);
    puts(first_is_late(16, 2) && first_is_late(40, 3) ? "shared" : "alone");
    return 0;
}
"""


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_every_item_is_done_once_and_a_late_thread_is_relieved(compiler: str, tmp_path: Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"needs {compiler}")
    source, program = tmp_path / "loops.c", tmp_path / "loops"
    source.write_text(PARALLEL_H.read_text(encoding="utf-8") + PROGRAM, encoding="utf-8")
    flags = ("-std=gnu11", "-O2", "-fopenmp", "-Wall", "-Wextra", "-Werror")
    built = subprocess.run(
        [compiler, *flags, str(source), "-o", str(program)], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "shared\n")
