"""Syntax trees of Python files, parsed once for each process: for tests of the source and of the tests themselves."""

from __future__ import annotations

import ast
import functools
from pathlib import Path


@functools.cache
def tree(path: Path) -> ast.Module:
    """The parsed file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def functions_of(module: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions of a tree, methods and inner functions included."""
    return [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


@functools.cache
def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions of a file."""
    return functions_of(tree(path))
