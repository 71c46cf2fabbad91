"""Addresses of sections of the documentation."""

from __future__ import annotations

import os

VARIABLE = "EXCITE_DOCS"


def docs_url(page: str) -> str:
    """Address of a section of the documentation.

    Args:
        page: File and section, such as "margins.md#comparing-curves"; empty for none.

    Returns:
        The address on the site whose address is in the environment variable EXCITE_DOCS; without it the file in the
        repository, "docs/margins.md#comparing-curves", which pages show as text.
    """
    site = os.environ.get(VARIABLE, "").rstrip("/")
    if not page or not site.startswith(("http://", "https://")):
        return f"docs/{page}" if page else ""
    name, _, section = page.partition("#")
    return f"{site}/{name.removesuffix('.md')}/" + (f"#{section}" if section else "")
