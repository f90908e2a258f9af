"""SHA-256 of texts and files, and keyed hashes, which only a holder of the key can compute."""

import hashlib
import hmac
from pathlib import Path


def hash_text(text: str) -> str:
    """SHA-256 of a text, 64 hexadecimal digits.

    File names that are not valid UTF-8 are hashed as the bytes that they have on disk.
    """
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def hash_file(path: Path) -> str:
    """SHA-256 of a file's content, 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def keyed_hash(text: str, key: str | bytes) -> str:
    """HMAC-SHA256 of `text`, 64 hexadecimal digits.

    With the key it can be tested whether a name is among the hashes; the names cannot be recovered from them.
    """
    secret = key.encode() if isinstance(key, str) else key
    return hmac.new(secret, text.encode("utf-8", "surrogateescape"), hashlib.sha256).hexdigest()
