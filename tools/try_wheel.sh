#!/usr/bin/env bash
# Installs the wheel in dist/ into a fresh environment and runs the shortest demo from it, in an empty folder.
# The dependencies are those of the environment PYTHON belongs to (no download); excite itself comes from the wheel alone.
set -euo pipefail
python="$(realpath -s "${1:-.venv/bin/python}")"
wheel="$(realpath "$(ls -t dist/excite-*.whl | head -1)")"
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"

"$python" -m venv --without-pip fresh
packages="$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
fresh="$folder/fresh/bin/python"
into="$("$fresh" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
"$python" -m pip install -qq --disable-pip-version-check --no-deps --no-index --prefix "$folder/fresh" --ignore-installed "$wheel"
echo "$packages" > "$into/dependencies.pth" # a path only: .pth files of that folder, editable installs among them, are not read

"$fresh" - "$folder" <<'PYTHON'
import sys
from importlib.metadata import distribution
from pathlib import Path

import excite

where = Path(excite.__file__)
assert where.is_relative_to(sys.argv[1]), f"excite was imported from {where}, not from the wheel"
names = {str(path) for path in distribution("excite").files}
wanted = ["excite/py.typed", "licenses/LICENSE", "static/view.js", "static/page.css", "templates/live.html.j2", "audit.html.j2"]
missing = [end for end in wanted if not any(name.endswith(end) for name in names)]
assert not missing, f"not in the wheel: {', '.join(missing)}"
PYTHON
fresh/bin/excite --help > /dev/null
fresh/bin/excite demo --out demo --seeds 1 --epochs 2 --no-open
test -s demo/report.html
echo "wheel: $(basename "$wheel") works in a fresh environment"
