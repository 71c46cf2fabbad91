"""The benchmarks that `make bench` repeats; writes the first sections of docs/benchmarks.md and keeps the others.

    python -m benchmarks [--data FOLDER] [--quick]

FOLDER holds CIFAR-10 (by default EXCITE_DATA or the cache); without it digits are used. Takes about forty minutes on two
cores; --quick takes ten, with fewer repeats and shorter trainings.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
HEAD = """# Benchmarks

How long the operations of Excite take on a CPU, relative to a plain training step or to another tool. On a GPU: [benchmarks on a
GPU](benchmarks-gpu.md); by network size: [scaling](scaling.md).

The first three sections are written by `{command}`. Times are ratios of paired repeats in one run, because other
load on a machine slows all of them equally: medians, with quartiles.
"""
REST = "<!-- measured separately: kept by python -m benchmarks -->"
QUICK = {
    "excitation": ["--repeats", "9"],
    "margins": ["--points", "170", "--repeats", "1", "--epochs", "2", "--threads", "1", "--processor-time"],
    "richness": ["--repeats", "3", "--points", "2000"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with CIFAR-10")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, shorter trainings")
    options = parser.parse_args()
    parts = [HEAD.format(command="python -m benchmarks --quick" if options.quick else "make bench")]
    # A process each, so that one benchmark's threads and memory do not follow the other around.
    for name in ("excitation", "margins", "richness"):
        shown = ["python", "-m", f"benchmarks.{name}", *(QUICK[name] if options.quick else [])]
        data = ["--data", options.data] if options.data and name != "excitation" else []
        print(f"running {' '.join(shown)} …", file=sys.stderr)
        done = subprocess.run([sys.executable, *shown[1:], *data], stdout=subprocess.PIPE, text=True, check=True)
        parts.append(f"{done.stdout.strip()}\n\nCommand: `{' '.join(shown)}`\n")
    _, marker, rest = PAGE.read_text(encoding="utf-8").partition(REST)
    PAGE.write_text("\n".join(parts) + f"\n{marker}{rest}", encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
