"""The commands `excite data list` and `excite data fetch`."""

from __future__ import annotations

from typing import Annotated

import typer

from excite.cli.shared import add_group, console, print_line, progress_bars

data_app = add_group("data", "List, download and verify datasets.")


@data_app.command("list", epilog="Example: excite data list")
def data_list() -> None:
    """List the available datasets and the folder of downloads."""
    from rich.table import Table

    from excite.data import BUILT_IN, DOWNLOADED, cache_folder

    table = Table(box=None, pad_edge=False)
    for heading in ("name", "source"):
        table.add_column(heading)
    for name in BUILT_IN:
        table.add_row(name, "built in")
    for name in DOWNLOADED:
        table.add_row(name, f"excite data fetch {name}")
    console.print(table)
    print_line(f"cache: {cache_folder()} (set EXCITE_DATA to use another)")


@data_app.command("fetch", epilog="Example: excite data fetch cifar10")
def data_fetch(name: Annotated[str, typer.Argument(help="cifar10, mnist or fashion-mnist.")]) -> None:
    """Download, verify and cache a dataset. Files that already exist with the right hash are not downloaded again."""
    from excite.data import fetch

    with progress_bars() as progress:
        path = fetch(name, progress=progress)
    print_line(f"{name}: {path}")
