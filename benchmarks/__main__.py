"""All benchmarks; writes docs/benchmarks.md.

    python -m benchmarks [--data FOLDER]      # FOLDER with CIFAR-10, as EXCITE_DATA
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
HEAD = """# Benchmarks

Written by `make bench`. Ratios are of paired repeats in one run, because other work on a machine slows all contestants alike;
medians, with quartiles.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with CIFAR-10; by default EXCITE_DATA or the cache")
    data = parser.parse_args().data
    # A process each, so that one benchmark's threads and memory do not follow the other around.
    parts = [HEAD]
    for name, options in (("excitation", []), ("margins", ["--data", data] if data else [])):
        command = [sys.executable, "-m", f"benchmarks.{name}", *options]
        print(f"running {name} …", file=sys.stderr)
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        parts.append(done.stdout.strip() + f"\n\nCommand: `python -m benchmarks.{name}`\n")
    PAGE.write_text("\n".join(parts))
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
