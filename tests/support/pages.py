"""Reads a page of HTML as a strict browser would: its elements, their attributes and texts, its pictures."""

import re
import xml.etree.ElementTree as ET
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

from typing_extensions import override

VOID = {"meta", "img", "br", "link", "input", "hr"}
BLOCKS = {"dd", "div", "dt", "p", "td", "th"}
"""Elements that a browser keeps apart where no space is written between them."""


@dataclass
class Element:
    """An element and the pieces of text in it and below it."""

    tag: str
    attributes: dict[str, str]
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text with single spaces."""
        return " ".join("".join(self.parts).split())


class Page(HTMLParser):
    """A page, with its elements in the order in which they begin; each text belongs to all elements around it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text()
        self.elements: list[Element] = []
        self._open: list[Element] = []
        self.feed(self.source)
        self.close()
        assert not self._open, f"never closed: {[element.tag for element in self._open]}"

    @override
    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    @override
    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    @override
    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"nothing is open, but </{tag}> closes it"
        assert self._open[-1].tag == tag, f"<{self._open[-1].tag}> is open, but </{tag}> closes it"
        self._open.pop()
        if tag in BLOCKS:
            self.handle_data(" ")

    @override
    def handle_data(self, data: str) -> None:
        for element in self._open:
            element.parts.append(data)

    def all(self, tag: str, kind: str | None = None) -> list[Element]:
        """The elements with a tag, or those among them whose class contains `kind`."""
        return [e for e in self.elements if e.tag == tag and (kind is None or kind in e.attributes.get("class", ""))]

    @property
    def text(self) -> str:
        """The text of the whole page."""
        return self.all("body")[0].text

    @property
    def figures(self) -> dict[str, str]:
        """The key figures by name."""
        names = [e.text for e in self.all("dt")]
        values = [e.text for e in self.all("div", "value")]
        return dict(zip(names, values, strict=False))

    @property
    def svgs(self) -> list[ET.Element]:
        """The pictures; a strict XML parser has to take each of them."""
        return [ET.fromstring(text) for text in re.findall(r"<svg .*?</svg>", self.source, re.DOTALL)]
