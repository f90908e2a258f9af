"""Writes the tables of reason codes and flags into docs/guide/data-codes.md, from the code that uses them: python
docs/data_tables.py"""

from pathlib import Path

from octfm.catalog.acquisition import FLAGS
from octfm.formats.reasons import REASONS
from octfm.store.prepare import REASONS as AFTER_THE_SCAN

GUIDE = Path(__file__).parent / "guide" / "data-codes.md"


def reject_codes() -> str:
    rows = [
        f"| `{code}` | {reason.meaning} | {reason.fix} |" for code, reason in REASONS.items() if not reason.expected
    ]
    return "\n".join(["| code | what it means | what would put the file into the catalog |", "|---|---|---|", *rows])


def skip_codes() -> str:
    rows = [f"| `{code}` | {reason.meaning} |" for code, reason in REASONS.items() if reason.expected]
    return "\n".join(["| code | what it is |", "|---|---|", *rows])


def later_codes() -> str:
    rows = [f"| `{code}` | {meaning} |" for code, meaning in AFTER_THE_SCAN.items()]
    return "\n".join(["| code | what it means |", "|---|---|", *rows])


def flags() -> str:
    return "\n".join(
        [
            "| flag | what is doubtful, and what is made of it |",
            "|---|---|",
            *(f"| `{f}` | {m} |" for f, m in FLAGS.items()),
        ]
    )


def with_tables(text: str) -> str:
    """The guide with its four tables as the code has them now."""
    for name, table in (
        ("rejects", reject_codes()),
        ("skips", skip_codes()),
        ("later", later_codes()),
        ("flags", flags()),
    ):
        before, start, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(f"<!-- end of {name} -->")
        assert start and end, f"{GUIDE}: no place for the table of {name}"
        text = f"{before}{start}{table}\n{end}{after}"
    return text


if __name__ == "__main__":
    GUIDE.write_text(with_tables(GUIDE.read_text()))
