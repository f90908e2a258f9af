"""A contact sheet of the scans in a table of octfm segment, the most doubtful first."""

import base64
import os
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from octfm.errors import one_line
from octfm.io.archive import MEMBER, split_uri
from octfm.io.hashing import hash_text
from octfm.io.location import write_whole
from octfm.report.page import MAX_BYTES, render, write_page
from octfm.report.segmented.pictures import LINES, bscan_picture
from octfm.tasks.scene import FOUND_COLOURS
from octfm.volume.segmentation import words_of

if TYPE_CHECKING:
    from octfm.layers.segment import ScanSegmentation


class ContactSheet:
    """TABLE.pictures.html next to a table of octfm segment: a picture of every scan, the most doubtful first. Pictures
    are kept in the folder TABLE.pictures, so that the page of a table that is continued has all of them."""

    def __init__(self, table: Path):
        name = table.name.removesuffix(".csv")  # a.CSV is another table
        self.page = table.with_name(f"{name}.pictures.html")
        self.folder = table.with_name(f"{name}.pictures")

    def add(self, source: str, found: "ScanSegmentation") -> None:
        """Write the picture of a scan, replacing an earlier one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self._path(source), bscan_picture(found))

    def move(self, old: str, new: str) -> None:
        """Give the file `new` the picture of the scan that was in the file `old`, or none if that had none: an earlier
        one would show another scan."""
        if (before := self._path(old)).exists():
            # Not renamed: a call that is stopped before the table is written does this again.
            write_whole(self._path(new), before.read_bytes())
        else:
            self._path(new).unlink(missing_ok=True)

    def keep_only(self, rows: Iterable[dict[str, str]]) -> None:
        """Delete pictures of scans that have no row any more. Only the writer of the table may call this: another one
        adds a picture before its row."""
        of_rows = {self._path(row["source"]) for row in rows}
        for picture in self.folder.glob("*.png"):
            if picture not in of_rows:
                picture.unlink(missing_ok=True)

    def _path(self, source: str) -> Path:
        return self.folder / f"{hash_text(source)[:24]}.png"

    def write(self, rows: Sequence[dict[str, str]], room: int = MAX_BYTES - 1_000_000) -> Path:
        """Write the page from the rows of the table; pictures of the least doubtful scans that do not fit into `room`
        bytes are left out."""
        from octfm.layers.rows import ACCEPTED
        from octfm.models.layer_net import MASKS
        from octfm.weights.packaged import NOTE

        cards, size, below = [], 0, _below(row["source"] for row in rows)
        for row in sorted(rows, key=lambda row: (not row["problem"], -float(row["doubt"] or 0))):
            path, src = self._path(row["source"]), ""
            if path.exists():
                coded = base64.b64encode(path.read_bytes()).decode()
                size += len(coded)
                src = f"data:image/png;base64,{coded}" if size <= room else ""
            measured = [f"centre {row['centre_um']} µm"] if row["centre_um"] else []
            measured += [
                f"{name[:-3].replace('_', ' ')} {nl} nl"
                for name, nl in row.items()
                if name.endswith("_nl") and float(nl or 0) > 0
            ]
            refused = row["verdict"] not in ("", ACCEPTED)
            own = row | {"source": below[row["source"]]}
            if len(above := row["source"].removesuffix(own["source"])) > 1:
                own["problem"] = row["problem"].replace(above, "")
            shown = {name: one_line(own[name]) for name in ("source", "problem", "zones_note")}
            cards.append({**row, **shown, "src": src, "refused": refused, "had": path.exists(), "measured": measured})
        facts = {
            "cards": cards,
            "refused": sum(card["refused"] for card in cards),
            "unread": sum(bool(card["problem"]) for card in cards),
            "shown": sum(bool(card["src"]) for card in cards),
            "pictures": sum(card["had"] for card in cards),
            "note": NOTE,
            "legend": [(words_of(name), FOUND_COLOURS[name]) for name in (*LINES, *MASKS)],
        }
        return write_page(render("contact_sheet.html.jinja", facts), self.page)


def _below(sources: Iterable[str]) -> dict[str, str]:
    """Source → its path below the folder that holds all of them; folders further up may be named after people."""
    sources = list(sources)
    levels = zip(*(PurePath(_file(source)).parts[:-1] for source in sources), strict=False)
    shared = sum(1 for _ in takewhile(lambda names: len(set(names)) == 1, levels))
    return {source: str(PurePath(*PurePath(source).parts[shared:])) if shared else source for source in sources}


def _file(source: str) -> str:
    """The file of a scan, or the archive that contains it, whether or not it still exists."""
    there = os.path.exists(source)  # noqa: PTH110  (False for what is no file name)
    return source if there else (split_uri(source) or source.partition(MEMBER))[0]
