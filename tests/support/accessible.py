"""What a screen reader and a keyboard need of a page, checked in its HTML; contrast and distance of colours."""

from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np

VOID = {"meta", "link", "br", "img", "input", "hr", "use", "path", "col", "wbr"}
LABELABLE = {"input", "select", "textarea", "output"}
NAMED_BY_TEXT = {"button", "summary", "a", "th"}
VISION = {
    "usual": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
}
"""What linear red, green and blue become (Machado, Oliveira and Fernandes 2009, doi 10.1109/TVCG.2009.113)."""


class _Page(HTMLParser):
    """Every element as (tag, attributes, tags around it, its text)."""

    def __init__(self, text: str):
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None], list[str], list[str]]] = []
        self.labels: Counter[int] = Counter()
        """Controls in every <label>, which may hold one."""
        self._open: list[int] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        around = [self.elements[i][0] for i in self._open]
        if tag in LABELABLE and "label" in around:
            self.labels[self._open[around.index("label")]] += 1
        self.elements.append((tag, dict(attrs), around, []))
        if tag not in VOID:
            self._open.append(len(self.elements) - 1)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), [self.elements[i][0] for i in self._open], []))

    def handle_endtag(self, tag):
        while self._open and self.elements[self._open.pop()][0] != tag:
            pass

    def handle_data(self, data):
        for i in self._open:
            self.elements[i][3].append(data)


def assert_accessible(text: str) -> None:
    """A page, or a part of one, has a language and a title, one first heading and none skipped, unique ids, and a name
    for every picture, chart and control."""
    page = _Page(text)
    found = page.elements
    assert set(page.labels.values()) <= {1}, "a label with several controls"
    by_tag = {tag: [(a, "".join(words).strip()) for t, a, _, words in found if t == tag] for tag, *_ in found}
    if "html" in by_tag:
        assert by_tag["html"][0][0].get("lang") and by_tag["title"][0][1] and len(by_tag["main"]) == 1
        levels = [int(tag[1]) for tag, *_ in found if tag in ("h1", "h2", "h3", "h4")]
        assert levels[0] == 1 and levels.count(1) == 1, levels
        assert all(b <= a + 1 for a, b in pairwise(levels)), f"a level is skipped: {levels}"
        assert "maximum-scale" not in text and "user-scalable" not in text
    ids = [a["id"] for _, a, *_ in found if "id" in a]
    assert len(ids) == len(set(ids)), sorted(ids)
    labelled = {a["for"] for a, _ in by_tag.get("label", []) if a.get("for")}
    for tag, a, around, words in found:
        spoken = a.get("aria-label") or (tag in NAMED_BY_TEXT and "".join(words).strip())
        if tag in LABELABLE - {"output"}:
            assert "label" in around or a.get("id") in labelled or spoken, (tag, a)
        elif tag in NAMED_BY_TEXT or (tag in ("canvas", "svg") and "svg" not in around):
            assert spoken, f"<{tag}> without a name: {a}"
        elif tag == "img":
            assert a.get("alt"), a


def _linear(rgb: tuple[int, int, int]) -> np.ndarray:
    share = np.array(rgb) / 255
    return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)


def contrast(a: str, b: str) -> float:
    """WCAG's contrast of two colours #rrggbb, from 1 to 21."""
    dark, light = sorted(float(_linear(tuple(bytes.fromhex(c[1:]))) @ (0.2126, 0.7152, 0.0722)) for c in (a, b))
    return (light + 0.05) / (dark + 0.05)


def difference(a: tuple[int, int, int], b: tuple[int, int, int], vision: str) -> float:
    """Distance of two colours in CIELAB, as seen with this vision."""
    labs = []
    for rgb in (a, b):
        linear = np.clip(np.array(VISION[vision]) @ _linear(rgb), 0, 1)
        to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
        xyz = np.array(to_xyz) @ linear / (0.9505, 1, 1.089)
        x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
        labs.append(np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)]))
    return float(np.linalg.norm(labs[0] - labs[1]))
