"""Matplotlib figures as SVG: one picture for light and dark, with text that stays text.

Report, `fourmin tune`, `fourmin plan` and the documentation draw like this:

    with style():
        figure, (left, right) = wide_figure(4.2, 2)
        left.plot(..., color=SERIES[0])
        return to_svg(figure, "name", "What the picture shows", standalone=True)

The colours of this module are placeholders: `to_svg` replaces them with the CSS variables that `THEME` sets for light
and dark. Texts are never parsed as formulas, because names of users' settings may hold a dollar sign.
"""

import io
import re
import xml.etree.ElementTree as ET
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Near-black colours that nobody would pick, so that replacing them in the SVG hits nothing else.
INK, MUTED, FAINT, RULE, ALARM = (f"#00010{number}" for number in range(1, 6))
SERIES = tuple(f"#0002{number:02x}" for number in range(1, 9))
"""The colours of curves, in the order in which matplotlib takes them."""
VARIABLES = {color: f"var(--series-{number})" for number, color in enumerate(SERIES, start=1)} | {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    FAINT: "var(--faint)",
    RULE: "var(--rule)",
    ALARM: "var(--alarm)",
}

THEME = """\
:root {
  color-scheme: light dark;
  --paper: #fdfdfb; --ink: #1d2024; --muted: #63686e; --faint: #bfc2c4; --rule: #e2e1dc; --tint: #f4f3ee;
  --alarm: #b3261e; --alarm-tint: #fbecea;
  --series-1: #2b61b5; --series-2: #c05a12; --series-3: #2a7a55; --series-4: #7b4ba6;
  --series-5: #a97a00; --series-6: #167f8f; --series-7: #b03a77; --series-8: #5f6b2b;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #15171a; --ink: #e7e5e0; --muted: #9da2a8; --faint: #4d5359; --rule: #2f3338; --tint: #1d2024;
    --alarm: #ff8a80; --alarm-tint: #33201f;
    --series-1: #7fabf0; --series-2: #f0985a; --series-3: #6cc49a; --series-4: #c09bea;
    --series-5: #dcb85a; --series-6: #5fc3d2; --series-7: #ef8dbd; --series-8: #b3c07a;
  }
}
svg { font-family: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
"""
"""The style sheet of a page or of a picture that stands alone."""

# Matplotlib types the keys as a closed list that changes with its versions.
SETTINGS: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": RULE,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.labelcolor": MUTED,
    "axes.labelsize": 11,
    "axes.prop_cycle": f"cycler(color={list(SERIES)})",
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 12,
    "figure.facecolor": "none",
    "font.size": 11,
    "grid.color": RULE,
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.solid_capstyle": "round",
    "svg.fonttype": "none",
    # With a fixed salt for ids the same figure gives the same bytes.
    "svg.hashsalt": "fourmin",
    "text.parse_math": False,
    "text.color": INK,
    "xtick.color": RULE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
}
"""Matplotlib's settings for every figure of the package."""

_SVG = "http://www.w3.org/2000/svg"
_LINK = "{http://www.w3.org/1999/xlink}href"
_REFERENCE = re.compile(r"#([\w-]+)")
_COLOR = re.compile("|".join(VARIABLES))
_FONT_FAMILY = re.compile(r"font-family:[^;]*;?")


def style() -> AbstractContextManager[None]:
    """A context with SETTINGS, in which a figure is made, drawn and turned into SVG."""
    import matplotlib

    return matplotlib.rc_context(SETTINGS)


def wide_figure(height: float, num_columns: int = 1, **ratios: Any) -> tuple["Figure", list["Axes"]]:
    """A figure as wide as a page of the documentation, `height` in inches, with its axes side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.5, height), layout="constrained")
    return figure, list(figure.subplots(1, num_columns, squeeze=False, **ratios)[0])


def log_axes(axes: "Axes", x_base: int | None = None, y_base: int | None = None) -> None:
    """Makes each axis with a base logarithmic. Its ticks have plain numbers, because no text is parsed as a formula."""
    for base, axis, set_scale in ((x_base, axes.xaxis, axes.set_xscale), (y_base, axes.yaxis, axes.set_yscale)):
        if base is not None:
            set_scale("log", base=base)
            axis.set_major_formatter(lambda value, _: tick_label(value))
    axes.minorticks_off()


def tick_label(value: float) -> str:
    """A number as short as the side of a chart wants it: `1.5k` for 1500."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:g}{letter}"
    return f"{value:g}"


def to_svg(figure: "Figure", name: str, label: str, standalone: bool = False) -> str:
    """The figure as an `<svg>` element, described by `label`, that follows the theme of the page around it.

    Every id in the element begins with `name`, so that ids of different pictures on a page differ. With `standalone`
    the text is a whole file, which has THEME and a background of its own.
    """
    file = io.BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    root = ET.fromstring(file.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            # Matplotlib's own style sheet would apply to everything on the page.
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                parent.remove(child)
    references = (element.get(attribute, "") for element in root.iter() for attribute in (_LINK, "clip-path"))
    used_ids = {used_id for reference in references for used_id in _REFERENCE.findall(reference)}
    for element in root.iter():
        _adapt(element, name, used_ids)
    del root.attrib["width"], root.attrib["height"]
    root.attrib.update({"role": "img", "aria-label": label, "class": "plot"})
    if standalone:
        sheet = ET.Element(f"{{{_SVG}}}style")
        sheet.text = THEME + "svg { background: var(--paper); }"
        root.insert(0, sheet)
    ET.register_namespace("", _SVG)
    # ASCII with character references reads the same in every encoding.
    text: str = ET.tostring(root, encoding="us-ascii", xml_declaration=standalone).decode()
    return text


def _adapt(element: ET.Element, name: str, used_ids: set[str]) -> None:
    """Prefixes the ids that something refers to, drops the others, and leaves colours and fonts to the theme."""
    own_id = element.attrib.pop("id", None)
    if own_id in used_ids:
        element.set("id", f"{name}-{own_id}")
    if link := element.attrib.pop(_LINK, None):
        element.set("href", link.replace("#", f"#{name}-"))
    if "clip-path" in element.attrib:
        element.set("clip-path", element.attrib["clip-path"].replace("#", f"#{name}-"))
    if "style" in element.attrib:
        css = _COLOR.sub(lambda found: VARIABLES[found[0]], element.attrib["style"])
        element.set("style", _FONT_FAMILY.sub("", css).strip())
