"""Matplotlib figures as SVG for a page: text stays text, colours follow the theme, ids do not clash."""

import io
import re
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Drawn in colours that nobody would pick; each becomes a CSS variable, so that light and dark share one picture.
INK, MUTED, FAINT, RULE, ALARM = (f"#00010{number}" for number in range(1, 6))
SERIES = tuple(f"#0002{number:02x}" for number in range(1, 9))
VARIABLES = {color: f"var(--series-{number})" for number, color in enumerate(SERIES, start=1)} | {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    FAINT: "var(--faint)",
    RULE: "var(--rule)",
    ALARM: "var(--alarm)",
}

# Matplotlib types the keys as a closed list that changes with its versions.
SETTINGS: dict[Any, Any] = {
    "axes.edgecolor": RULE,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": MUTED,
    "axes.labelsize": 11,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 12,
    "figure.facecolor": "none",
    "font.size": 11,
    "grid.color": RULE,
    "grid.linewidth": 0.8,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",
    # Same input, same bytes.
    "svg.hashsalt": "fourmin",
    # Names of users' settings may hold a dollar sign.
    "text.parse_math": False,
    "text.color": INK,
    "xtick.color": RULE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
}
"""Of matplotlib, for every figure of a report."""

_SVG = "http://www.w3.org/2000/svg"
_LINK = "{http://www.w3.org/1999/xlink}href"
_REFERENCE = re.compile(r"#([\w-]+)")
_COLOR = re.compile("|".join(VARIABLES))
_FONT_FAMILY = re.compile(r"font-family:[^;]*;?")


def to_svg(figure: "Figure", name: str, label: str, style: str = "") -> str:
    """The figure as an element: ids begin with `name`, `label` tells what it shows, `style` makes it stand alone."""
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    root = ET.fromstring(file.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            # Matplotlib's own style would apply to the whole page.
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                parent.remove(child)
    used = {link for element in root.iter() for link in _links(element)}
    for element in root.iter():
        _clean(element, name, used)
    del root.attrib["width"], root.attrib["height"]
    root.attrib.update({"role": "img", "aria-label": label, "class": "plot"})
    if style:
        sheet = ET.Element(f"{{{_SVG}}}style")
        sheet.text = style
        root.insert(0, sheet)
    ET.register_namespace("", _SVG)
    # ASCII with character references: the same bytes whatever encoding the reader expects.
    text: str = ET.tostring(root, encoding="us-ascii", xml_declaration=False).decode()
    return text


def _links(element: ET.Element) -> list[str]:
    places = (element.get(_LINK, ""), element.get("clip-path", ""))
    return [link for place in places for link in _REFERENCE.findall(place)]


def _clean(element: ET.Element, name: str, used: set[str]) -> None:
    own = element.attrib.pop("id", None)
    if own in used:
        element.set("id", f"{name}-{own}")
    if link := element.attrib.pop(_LINK, None):
        element.set("href", link.replace("#", f"#{name}-"))
    if "clip-path" in element.attrib:
        element.set("clip-path", element.attrib["clip-path"].replace("#", f"#{name}-"))
    if "style" in element.attrib:
        style = _COLOR.sub(lambda found: VARIABLES[found[0]], element.attrib["style"])
        element.set("style", _FONT_FAMILY.sub("", style).strip())
