"""The command `excite serve`."""

from __future__ import annotations

from typing import Annotated

import typer

from excite.cli.shared import app, print_line


@app.command(short_help="Serve a live page of runs while they train.", epilog="Example: excite serve runs")
def serve(
    runs: Annotated[str, typer.Argument(help="A folder of runs, a run folder, or the URL of either.")] = "runs",
    host: Annotated[
        str, typer.Option(help="Address to listen on; any address but localhost requires a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 selects a free one.")] = 8765,
    token: Annotated[str | None, typer.Option(help="Access token; generated if omitted where one is required.")] = None,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = False,
) -> None:
    """Serve a live page of runs while they train, compared on the same axes. Ctrl-C stops it."""
    from excite.report.live import serve as serve_runs

    def announce(address: str) -> None:
        print_line(f"open {address} (Ctrl-C stops the server)")
        if open_page:
            import webbrowser

            webbrowser.open(address)

    serve_runs(runs, host, port, token, announce)
