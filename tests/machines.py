"""The quick tests as on other machines: `python tests/machines.py [default avx2 threads seed order load]`.

- default, avx2: PyTorch's kernels for processors without AVX-512, and without AVX.
- threads: four threads for each test process, so that sums are split differently.
- seed: other examples of Hypothesis; the seed is printed.
- order: the tests in a random order; the seed is printed.
- load: four busy processes per core beside the tests.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

MACHINES: dict[str, dict[str, str]] = {
    "default": {"ATEN_CPU_CAPABILITY": "default"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "threads": {"OMP_NUM_THREADS": "4", "EXCITE_TEST_THREADS": "4"},
    "seed": {},
    "order": {},
    "load": {},
}


@contextmanager
def busy(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run(machine: str, options: list[str]) -> int:
    command = [sys.executable, "-m", "pytest", "-n", os.environ.get("WORKERS", "2"), "-m", "not slow", *options]
    settings = {"OMP_NUM_THREADS": "1"} | os.environ | MACHINES[machine]
    seed = str(random.SystemRandom().randrange(10**6))
    if machine == "seed":
        command += ["--hypothesis-profile", "random", "--hypothesis-seed", seed]
    if machine == "order":
        settings["EXCITE_TEST_ORDER"] = seed
        print(f"EXCITE_TEST_ORDER={seed}")
    print(f"{machine}: {' '.join(command[1:])}", flush=True)
    with busy(4 * (os.cpu_count() or 1) if machine == "load" else 0):
        return subprocess.run(command, env=settings).returncode


if __name__ == "__main__":
    chosen = [name for name in sys.argv[1:] if name in MACHINES] or list(MACHINES)
    failed = [name for name in chosen if run(name, [word for word in sys.argv[1:] if word not in MACHINES]) != 0]
    sys.exit(f"failed on: {', '.join(failed)}" if failed else 0)
