"""SHA-256 of texts and files, and keyed hashes, which only somebody with the key can repeat."""

import hashlib
import hmac
from pathlib import Path


def hash_text(text: str) -> str:
    """64 hexadecimal digits. Names of files that are not valid UTF-8 keep their bytes."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def hash_file(path: Path) -> str:
    """64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def keyed_hash(text: str, key: str | bytes) -> str:
    """HMAC-SHA256, 64 hexadecimal digits: membership can be tested, names cannot be read off."""
    secret = key.encode() if isinstance(key, str) else key
    return hmac.new(secret, text.encode("utf-8", "surrogateescape"), hashlib.sha256).hexdigest()
