"""What mkdocstrings asks when it has read a source: its docstrings, as Markdown."""

from __future__ import annotations

from typing import Any

import griffe
from docstrings import markdown


class HouseDocstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = markdown(obj.docstring.value, obj.name)
