"""Parts of the pictures that are drawn as SVG."""

from __future__ import annotations

from collections.abc import Iterable


def picture_of(width: int, height: int, parts: Iterable[str]) -> str:
    """Return a picture with a white ground."""
    size = f"viewBox='0 0 {width} {height}' width='{width}'"
    ground = f"<rect width='{width}' height='{height}' fill='white'/>"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' {size}>"
    return "\n".join([head, ground, *parts, "</svg>"]) + "\n"


def text(x: int, y: int, words: str, size: int = 13, more: str = "") -> str:
    """Return words whose line begins at a point."""
    style = f"font-family='sans-serif' font-size='{size}' fill='#333'"
    return f"<text x='{x}' y='{y}' {more}{style}>{words}</text>"


def box(x: int, y: int, width: int, height: int, colour: str) -> str:
    """Return a filled rectangle."""
    return f"<rect x='{x}' y='{y}' width='{width}' height='{height}' fill='{colour}'/>"
