"""Hook of mkdocs: writes the help of every command into docs/reference/command-line.md when the site is built."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
MARKER = "<!-- commands -->"


def command_help() -> str:
    """One section per command, with its help text as the terminal shows it."""
    sys.path.insert(0, str(ROOT / "src"))
    import typer

    from excite.cli.app import app

    def sections(command: Any, name: str, parent: Any) -> list[str]:
        context = command.context_class(
            command, info_name=name, parent=parent, terminal_width=100, max_content_width=100
        )
        if hasattr(command, "commands"):
            inner = [sections(found, key, context) for key, found in command.commands.items()]
            return [section for part in inner for section in part]
        return [f"## {context.command_path}\n\n```text\n{command.get_help(context)}\n```\n"]

    return "\n".join(sections(typer.main.get_command(app), "excite", None))


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return markdown.replace(MARKER, command_help()) if MARKER in markdown else markdown
