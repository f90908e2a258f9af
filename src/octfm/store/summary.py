"""What a store holds, in counts."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from octfm.store.layout import StoreRow, Unprepared


def summary(rows: Sequence[StoreRow], unprepared: Sequence[Unprepared]) -> dict[str, Any]:
    """Counts: volumes, participants, low-confidence bands per scanner and diagnosis, unprepared per code."""
    by_scanner: dict[str, dict[str, int]] = {}
    by_diagnosis: dict[str, dict[str, int]] = {}
    for row in rows:
        for table, key in ((by_scanner, row.scanner), (by_diagnosis, row.diagnosis)):
            if key is not None:
                counts = table.setdefault(key, {"volumes": 0, "low_confidence": 0})
                counts["volumes"] += 1
                counts["low_confidence"] += not row.confident
    return {
        "volumes": len(rows),
        "participants": len({row.participant for row in rows}),
        "low_confidence": sum(not row.confident for row in rows),
        "by_scanner": dict(sorted(by_scanner.items())),
        "by_diagnosis": dict(sorted(by_diagnosis.items())),
        "found": dict(Counter(flag for row in rows for flag in row.found).most_common()),
        "unprepared": dict(Counter(u.code for u in unprepared).most_common()),
    }
