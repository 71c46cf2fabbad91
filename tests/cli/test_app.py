"""The entry point: help, errors, exit status, imports."""

import json
import subprocess
import sys

import pytest
import typer

from excite.cli.app import app

GROUP = typer.main.get_command(app)
COMMANDS = [
    [name, *below]
    for name, command in GROUP.commands.items()
    for below in ([[name] for name in command.commands] if hasattr(command, "commands") else [[]])
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_has_an_example(excite, command):
    status, out, _ = excite(*command, "--help")
    assert status == 0
    assert f"Example: excite {' '.join(command)}" in out


def test_help_lists_the_commands(excite):
    for arguments in ((), ("--help",), ("-h",)):
        _, out, err = excite(*arguments)
        assert all(f"  {command[0]} " in out + err for command in COMMANDS)


@pytest.mark.parametrize("module", ["excite", "excite.cli", "excite.cli.app"])
def test_the_command_line_runs_as_a_module(module):
    command = [sys.executable, "-m", module, "--version"]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    assert finished.stdout.count(".") >= 2


def test_an_unexpected_error_is_one_line(excite, monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("a\nbug")

    monkeypatch.setattr("excite.cli.diagnosis.diagnose", fail)
    status, _, err = excite("doctor")
    assert status == 1
    assert err == "excite: unexpected RuntimeError: a bug (`excite --debug …` shows the traceback)\n"


@pytest.mark.slow
def test_debug_shows_the_traceback():
    command = [sys.executable, "-m", "excite.cli.app", "--debug", "report", "nowhere"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode != 0
    assert "Traceback" in finished.stderr


def test_help_imports_nothing_heavy():
    code = "import sys, json, excite.cli.app; print(json.dumps([m for m in ('torch', 'numpy', 'pandas') if m in sys.modules]))"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(finished.stdout) == []


@pytest.mark.slow
def test_importing_excite_needs_only_torch_and_numpy():
    code = (
        "import sys, json, excite; from excite import PersistentExcitation, margins, trace, watch, lipschitz; import excite.train\n"
        "print(json.dumps([m for m in ('pandas', 'pydantic', 'plotly', 'typer', 'matplotlib', 'sklearn', 'rich', 'pooch', 'jinja2') if m in sys.modules]))"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(finished.stdout) == []
