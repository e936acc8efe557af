"""Colours: what each style of ours looks like in the theme, in one place.

Drawing code knows style names only. A ``Palette`` holds them as Rich styles, made once per theme.
No state is told by colour alone; with NO_COLOR there is none, and weight, underline and reverse
stand for what matters most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.style import Style
from textual.color import Color, ColorParseError
from textual.theme import Theme

if TYPE_CHECKING:
    from collections.abc import Sequence

    from textual.app import App

HIGH_CONTRAST = Theme(
    name="high-contrast",
    primary="#00AFFF",
    secondary="#00D7FF",
    accent="#FFFF00",
    foreground="#FFFFFF",
    background="#000000",
    surface="#000000",
    panel="#262626",
    success="#00FF5F",
    warning="#FFFF00",
    error="#FF5F5F",
    dark=True,
)

THEMES = (
    "textual-dark",
    "textual-light",
    "high-contrast",
    "nord",
    "gruvbox",
    "solarized-light",
    "ansi-dark",
    "ansi-light",
)
"""In the order in which the key goes through them."""

_DARK_RAMP = (
    "#1E3A5F", "#1F5A7A", "#1F7A8C", "#2E9E8F", "#5DBB63", "#B5C334", "#F0A030", "#F2545B",
)  # fmt: skip
_LIGHT_RAMP = (
    "#C9DDF0", "#9CC4DE", "#6FAFC8", "#4C9FA5", "#5A9E4B", "#A89A1E", "#D07A12", "#C4262E",
)  # fmt: skip
_DARK_HUES = (
    "#5DA9E9", "#F4A259", "#8CB369", "#E56399", "#B58DF1", "#4ECDC4", "#F2D24B", "#C08457",
)  # fmt: skip
_LIGHT_HUES = (
    "#1F6FB2", "#B85C00", "#3F7A1F", "#B01F66", "#6A3FC0", "#0B7F78", "#8A6D00", "#7A4A20",
)  # fmt: skip

_BLENDS = {"dim": 0.45, "border": 0.6, "plain": 0.0, "unseen": 0.8, "free": 0.72}
"""How far from the foreground to the background."""

_VARIABLES = {
    "head": "primary", "key": "accent", "ok": "success", "warn": "warning", "bad": "error",
    "arriving": "accent", "sending": "warning", "quarantined": "error", "nobody": "error",
    "graph-low": "success", "graph-mid": "warning", "graph-high": "error",
}  # fmt: skip
"""Colours that the theme has by name."""

_OWN = {
    True: {"locked": "#B58DF1", "cached": "#3D7EAA", "saved": "#5B8E9E", "held": "#5DBB63"},
    False: {"locked": "#6A3FC0", "cached": "#5B9BD5", "saved": "#7FA8B8", "held": "#3F8F45"},
}
"""Colours of page states, so that they differ from each other in every theme."""

_BOLD = ("head", "key", "bad", "warn", "selected", "lit", "nobody", "quarantined")
_WEIGHTS = dict.fromkeys(_BOLD, Style(bold=True))
_WITHOUT_COLOUR = {
    **_WEIGHTS,
    **dict.fromkeys(("bad", "nobody"), Style(bold=True, underline=True)),
    **dict.fromkeys(("cursor", "lit"), Style(reverse=True)),
    **dict.fromkeys(("dim", "border"), Style(dim=True)),
}

PLAIN = Style()


class Palette:
    """The styles of one theme; ``colours`` has all of them, and the backgrounds of bars."""

    def __init__(self, app: App[None]) -> None:
        self.has_colour = not app.no_color
        self._made: dict[tuple[str, str], Style] = {}
        self._colours = _colours(app) if self.has_colour else {}
        self._least = least_contrast(app.theme)
        if self.has_colour and not is_terminals(app.theme):
            grounds = grounds_of(app.theme_variables)
            self._colours |= {
                name: readable(colour, grounds, self._least)
                for name, colour in self._colours.items()
                if name not in UNREAD
            }

    def style(self, name: str, under: str = "") -> Style:
        """The style of this name; ``under``: the one whose colour is the background."""
        made = self._made.get((name, under))
        if made is None:
            made = self._made[name, under] = self._make(name, under)
        return made

    def _make(self, name: str, under: str) -> Style:
        if not self.has_colour:
            style = _WITHOUT_COLOUR.get(name, PLAIN)
            return style + _WITHOUT_COLOUR.get(under, PLAIN) if under in _BACKGROUNDS else style
        colour = self._colours.get(name)
        ground = self._colours.get(_BACKGROUNDS.get(under, under)) if under else None
        if name in _BACKGROUNDS:
            colour, ground = self._colours.get("plain"), self._colours.get(_BACKGROUNDS[name])
        if name == "label" and ground is not None:
            colour = ink_on([ground])
        if colour is not None and ground is not None and {name, under} & _BACKGROUNDS.keys():
            colour = readable(colour, [ground], self._least)
        made = Style.from_color(
            colour.rich_color if colour is not None else None,
            ground.rich_color if ground is not None else None,
        )
        return made + _WEIGHTS.get(name, PLAIN)


_BACKGROUNDS = {"cursor": "cursor-ground", "lit": "lit-ground", "selected": "selected-ground"}
"""Styles that are a background, with the colour it has; also what may lie under others."""


def _colours(app: App[None]) -> dict[str, Color]:
    """A colour for every style name, from the variables of the theme."""
    variables = app.theme_variables
    dark = app.current_theme.dark
    front = _colour(variables, "foreground", "#E0E0E0" if dark else "#202020")
    back = _colour(variables, "background", "#121212" if dark else "#F0F0F0")
    found = {name: front.blend(back, share) for name, share in _BLENDS.items()}
    for name, variable in _VARIABLES.items():
        found[name] = _colour(variables, variable, "#808080")
    found |= {name: Color.parse(text) for name, text in _OWN[dark].items()}
    ramp, hues = (_DARK_RAMP, _DARK_HUES) if dark else (_LIGHT_RAMP, _LIGHT_HUES)
    found |= {f"ramp-{at}": Color.parse(text) for at, text in enumerate(ramp)}
    found |= {f"hue-{at}": Color.parse(text) for at, text in enumerate(hues)}
    accent, primary = found["key"], _colour(variables, "primary", "#0178D4")
    found["cursor-ground"] = back.blend(primary, 0.4)
    found["selected-ground"] = back.blend(primary, 0.25)
    found["lit-ground"] = back.blend(accent, 0.6)
    return found


GROUNDS = ("background", "surface", "panel")
"""Variables of the theme on which text stands."""
UNREAD = frozenset({"border", "unseen", "free", "cursor-ground", "selected-ground", "lit-ground"})
"""Lines, what is empty, and what lies under text: no text has these."""


def is_terminals(theme: str) -> bool:
    """Whether the terminal has the colours of a theme, and nobody knows them."""
    return theme.startswith("ansi")


def grounds_of(variables: dict[str, str]) -> list[Color]:
    """What text stands on in a theme."""
    return [_colour(variables, name, "#121212") for name in GROUNDS]


def texts_of(variables: dict[str, str], theme: str) -> dict[str, str]:
    """Variables for what Textual paints itself: text, keys, and what it dims."""
    front, key = variables["foreground"], variables["accent"]
    if is_terminals(theme):
        return {"kvd-text": front, "kvd-key": key, "kvd-ink": front}
    grounds = grounds_of(variables)
    found = {"kvd-text": _colour(variables, "foreground", "#808080"), "kvd-key": Color.parse(key)}
    inks = {"kvd-ink": ink_on(grounds).hex}
    least = least_contrast(theme)
    return {name: readable(colour, grounds, least).hex for name, colour in found.items()} | inks


def least_contrast(theme: str) -> float:
    """Of text in a theme: what WCAG asks for, and what it asks for where contrast is wanted."""
    return 7.0 if theme == HIGH_CONTRAST.name else 4.5


INKS = (Color(0, 0, 0), Color(255, 255, 255))


def contrast(one: Color, other: Color) -> float:
    """From 1 to 21, as WCAG has it."""
    darker, lighter = sorted((_luminance(one), _luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: Color) -> float:
    parts = [part / 255 for part in colour.rgb]
    red, green, blue = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def ink_on(grounds: Sequence[Color]) -> Color:
    """Black or white, whichever stands out more."""
    return max(INKS, key=lambda ink: min(contrast(ink, ground) for ground in grounds))


def readable(colour: Color, grounds: Sequence[Color], least: float) -> Color:
    """The colour, as much lighter or darker as it takes to be read on all of these."""
    ink = ink_on(grounds)
    for step in range(20):
        made = colour.blend(ink, step / 20)
        if min(contrast(made, ground) for ground in grounds) >= least:
            return made
    return ink


def _colour(variables: dict[str, str], name: str, otherwise: str) -> Color:
    """A variable of the theme; some name a colour relative to another: then ``otherwise``."""
    try:
        return Color.parse(variables[name])
    except (KeyError, ColorParseError):
        return Color.parse(otherwise)
