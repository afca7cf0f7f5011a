"""team.c: a team does every item of a loop once, relieves a thread that is late, and is clean under the compiler's sanitizers."""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path

import pytest

from convoy.engines.compilers import host_compiler
from convoy.engines.compilers.host_compiler import compiler_support
from convoy.engines.cpu.native_launch import PARALLEL_H
from convoy.package.kernels import TEAM_C

PROGRAM = r"""
#include <stdio.h>
#include <time.h>

#define MOST 4096

typedef struct {
    int64_t items, threads;
    int *first, *second, *third, *fault;
} Counts;

static int is_set(const int *flag) { return __atomic_load_n(flag, __ATOMIC_ACQUIRE); }
static void set(int *flag) { __atomic_store_n(flag, 1, __ATOMIC_RELEASE); }

/* Until a number is reached; whether it was, within some seconds. */
static int reached(const int64_t *number, int64_t wanted) {
    for (time_t end = time(NULL) + PATIENCE; time(NULL) < end;)
        if (__atomic_load_n(number, __ATOMIC_ACQUIRE) == wanted) return 1;
    return 0;
}

static void nested(int *sum) {
    int found[5] = {0};
    PARALLEL_FOR(item, 5, 4) found[item]++;
    for (int i = 0; i < 5; i++) *sum += found[i] == 1;
}

/* Loops of several numbers of threads, some of which read what one before them wrote. All counts are plain: two threads that had
 * one item would race. */
static void count(const void *settings, void *const *tensors) {
    const Counts *z = settings;
    (void)tensors;
    PARALLEL_FOR(item, z->items, z->threads) {
        z->first[item]++;
        if (THREAD_NUMBER() >= z->threads) set(z->fault);
    }
    PARALLEL_FOR(item, z->items / 2, 3) z->second[item] += z->first[item] > z->second[item];
    MEET();
    EACH_ITEM(item, z->items, z->threads, z->third[item] += z->first[(item + z->items / 2) % z->items]);
    MEET();
    PARALLEL_FOR(item, z->items % 7, z->threads) {
        int sum = 0;
        ALONE(nested(&sum));
        if (sum != 5) set(z->fault);
    }
}

/* So many runs of so many launches. */
static int counts_are_right(Pool *pool, int64_t items, int64_t threads, int runs, int launches) {
    int first[MOST] = {0}, second[MOST] = {0}, third[MOST] = {0}, fault = 0, times = runs * launches;
    Counts z = {items, threads, first, second, third, &fault};
    Launch all[8];
    for (int i = 0; i < launches; i++) all[i] = (Launch){.call = count, .settings = &z};
    for (int i = 0; i < runs; i++) convoy_pool_run(pool, all, launches, NULL);
    int right = !is_set(&fault);
    for (int64_t i = 0; i < MOST; i++) {
        right &= first[i] == (i < items ? times : 0) && second[i] == (i < items / 2 ? times : 0);
        right &= third[i] == (i < items ? times * (times + 1) / 2 : 0);
    }
    return right;
}

typedef struct {
    int64_t items, done;
    int times[64], relieved;
} Late;

/* The thread that has the first item waits in it until all others are done. */
static void late_in_item(const void *settings, void *const *tensors) {
    Late *z = tensors[0];
    (void)settings;
    PARALLEL_FOR(item, z->items, 3) {
        if (item == 0) z->relieved = reached(&z->done, z->items - 1);
        z->times[item]++;
        __atomic_fetch_add(&z->done, 1, __ATOMIC_RELEASE);
    }
}

/* A thread of the team comes to the loop when all of it is done. */
static void late_before_loop(const void *settings, void *const *tensors) {
    Late *z = tensors[0];
    (void)settings;
    if (THREAD_NUMBER() == 1) z->relieved = reached(&z->done, z->items);
    PARALLEL_FOR(item, z->items, 3) {
        z->times[item]++;
        __atomic_fetch_add(&z->done, 1, __ATOMIC_RELEASE);
    }
}

static int is_relieved(Pool *pool, void (*call)(const void *, void *const *), int64_t items) {
    Late z = {.items = items};
    Operand operand = {.fixed = &z, .slot = -1};
    Launch launch = {call, NULL, &operand, 1};
    convoy_pool_run(pool, &launch, 1, NULL);
    int right = z.relieved;
    for (int64_t i = 0; i < items; i++) right &= z.times[i] == 1;
    return right;
}

static void *by_another_thread(void *argument) {
    Pool *pool = convoy_pool_new(*(int64_t *)argument);
    void *right = counts_are_right(pool, 99, 3, 20, 4) ? argument : NULL;
    convoy_pool_free(pool);
    return right;
}

int main(int words, char **word) {
    int64_t size = words > 1 ? atoi(word[1]) : 1;
    const int64_t items[] = {0, 1, 2, 5, 31, 32, 33, 100, 1000, MOST}, threads[] = {1, 2, 3, 64, 70};
    Pool *pool = convoy_pool_new(size);
    for (size_t i = 0; i < sizeof items / sizeof *items; i++)
        for (size_t t = 0; t < sizeof threads / sizeof *threads; t++)
            if (!counts_are_right(pool, items[i], threads[t], 6, 4)) return printf("wrong %d %d\n", (int)i, (int)t), 1;
    pthread_t other;
    void *right = NULL;
    if (pthread_create(&other, NULL, by_another_thread, &size)) return puts("no thread"), 1;
    if (!counts_are_right(pool, 99, 3, 20, 4)) return puts("wrong beside"), 1;
    pthread_join(other, &right);
    if (!right) return puts("wrong in another thread"), 1;
    if (size > 1) {
        if (!is_relieved(pool, late_in_item, 16)) return puts("late in an item"), 1;
        if (!is_relieved(pool, late_before_loop, 40)) return puts("late before a loop"), 1;
    }
    convoy_pool_free(pool);
    puts("right");
    return 0;
}
"""

SANITIZERS = {
    "none": ("-O2",),
    "thread": ("-O1", "-g", "-fsanitize=thread"),
    "address": ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
}


def built(folder: Path, source: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Compile a source to the program `team` in the folder; the compiler's messages."""
    text = folder / "team.c"
    text.write_text(source, encoding="utf-8")
    warnings = ("-std=gnu11", "-Wall", "-Wextra", "-Werror", "-pthread")
    command = [host_compiler.compiler(), *warnings, *flags, str(text), "-o", str(folder / "team")]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def said(
    folder: Path, size: int, flags: tuple[str, ...], change: tuple[str, str] = ("", ""), patience: int = 60
) -> str:
    """Run the program with a team of so many threads; its output, and its exit status where that is not 0."""
    if not compiler_support():
        pytest.skip("needs a C compiler")
    loops = PARALLEL_H.read_text(encoding="utf-8") + TEAM_C.read_text(encoding="utf-8")
    assert change[0] in loops
    source = loops.replace(*change) + PROGRAM if change[0] else loops + PROGRAM
    answer = built(folder, source, "-DCONVOY_TEAM", f"-DPATIENCE={patience}", *flags)
    if answer.returncode and built(folder, "int main(void) { return 0; }", *flags).returncode:
        pytest.skip("the compiler has no such sanitizer")
    assert answer.returncode == 0, answer.stderr
    done = subprocess.run([folder / "team", str(size)], capture_output=True, text=True, check=False, timeout=300)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the sanitizer does not work with this kernel's memory layout")
    return done.stdout.strip() + (f" {done.returncode} {done.stderr[-3000:]}" if done.returncode else "")


@pytest.mark.parametrize(("sanitizer", "size"), [*itertools.product(SANITIZERS, (1, 2, 3)), ("none", 7)])
def test_every_item_is_done_once_and_a_late_thread_is_relieved(sanitizer: str, size: int, tmp_path: Path) -> None:
    assert said(tmp_path, size, SANITIZERS[sanitizer]) == "right"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        # Nobody takes from others.
        (("i < all->count; i++) {\n        int64_t share", "i < 1; i++) {\n        int64_t share"), "late in an item"),
        # A loop begins before the one in front of it is done.
        (("if (team->loops != team->met) convoy_team_meet();", ""), "wrong"),
        # Threads without scratch memory have items.
        (("idle ? 0 : items", "items"), "wrong"),
        # Loops are not counted on from run to run.
        (("pool->workers[number].loops = convoy_team.loops;", ""), "late before a loop"),
    ],
)
def test_a_planted_fault_is_seen(change: tuple[str, str], words: str, tmp_path: Path) -> None:
    assert said(tmp_path, 3, SANITIZERS["none"], change, patience=3).startswith(words)
