"""Tables as parquet files, read without threads of pyarrow's own."""

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from octfm.io.location import Location

if TYPE_CHECKING:
    import pyarrow as pa


def to_parquet(table: "pa.Table") -> bytes:
    """The content of a parquet file with this table."""
    import pyarrow.parquet as pq

    content = io.BytesIO()
    pq.write_table(table, content, compression="zstd")
    return content.getvalue()


def from_parquet(path: Location, columns: Sequence[str] | None = None) -> "pa.Table":
    """The table in a parquet file on a disk or in a bucket, or these columns of it, in this order.

    Raises pyarrow.ArrowException if damaged, KeyError if a column is missing, FileNotFoundError if there is none.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    # pyarrow.parquet.read_table leaves threads behind that still clean up after it has returned. A command that ended
    # then was aborted ("terminate called without an active exception") in 1 of 100 tries on a busy machine.
    file = pq.ParquetFile(pa.BufferReader(path.read_bytes()), pre_buffer=False)
    table = file.read(list(columns) if columns else None, use_threads=False)
    return table.select(list(columns)) if columns else table  # `read` leaves out columns that are not there
