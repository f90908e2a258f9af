"""Addresses in options, settings and errors: which are known, and how credentials in them are refused and masked.

What is typed ends up in terminals, logs, catalogs and config.yaml, so an address with a key, a password or a token in it is refused before
anything is written, and never repeated.
"""

import os
import re

from octfm.errors import ConfigError

SCHEMES = ("s3", "gs")
"""Buckets that octfm reads and writes."""
_KNOWN = "s3|gs|s3a|s3n|gcs|file|https?|ftps?|sftp|ssh|scp|hdfs|webhdfs|az|azure|abfss?|wasbs?|adl|hf|r2|b2|oss|dbfs|webdav|smb|nfs"
"""Also without slashes behind the colon these are addresses, never folders."""

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):[/\\]+")
_WORD = re.compile(_ADDRESS.pattern + r"[^\s'\"<>]*")
_BEGINS_LIKE_ONE = re.compile(rf"(?i)\s*(?:({_KNOWN}):|([A-Za-z][A-Za-z0-9+.-]+):[/\\])")
_LOST_A_SLASH = re.compile(rf"(?i)[/\\]({_KNOWN}):(?:[/\\]|$)")
"""What becomes of s3:// in a path."""
_USER = re.compile(r"\s*(?:[/\\]{2,}[^/\\]*@|[^/\\@]{2,}:[^@]*@)")
"""//key:secret@bucket and key:secret@bucket, without a scheme."""
_WITHOUT_SLASHES = re.compile(rf"(?i)\s*({_KNOWN}):[^/\\]*(@|%40)")
_HOST = re.compile(r"[A-Za-z0-9._\[\]-]*(:\d*)?")
_BUCKET = re.compile(r"[A-Za-z0-9._-]*|arn:[A-Za-z0-9:-]+")
_TOKEN = re.compile(r"(?i)[?&;#][^=&?/]*(sig|token|secret|key|credential|passw|pwd|auth|sas|session)[^=&/]*(=|%3d)")


def is_bucket(name: str) -> bool:
    """Whether a bucket may be called so; with a key or a user before it, it may not."""
    return _BUCKET.fullmatch(name) is not None


def holds_credentials(text: str) -> bool:
    """Whether an address anywhere in this text has a user, a key, a password or a token in it, plain or percent-encoded."""
    if _WITHOUT_SLASHES.match(text):
        return True
    return any(_secretive(found[1], text[found.end() :]) for found in _ADDRESS.finditer(text))


def refuse_credentials(text: str) -> None:
    """Raises ConfigError, which does not repeat it, for text in which an address holds credentials."""
    if holds_credentials(text):
        raise ConfigError(
            f"{shown(text)}: the address holds credentials, which would end up in catalogs and logs; put them into the environment "
            "(AWS_*, GOOGLE_APPLICATION_CREDENTIALS) and give the address without them"
        )


def expect_place(text: str) -> str:
    """`text`, if it is a path on a disk or s3://bucket/… or gs://bucket/…. Raises ConfigError, which does not repeat an address."""
    refuse_credentials(text)
    scheme, _, rest = text.partition("://")
    if scheme not in SCHEMES:
        return expect_local(text, "expected a local path, s3://bucket/… or gs://bucket/…")
    if "?" in rest.split("!/")[0] or not is_bucket(rest.split("/")[0]):
        raise ConfigError(f"{scheme}://…: expected the name of a bucket and of what is in it, {scheme}://bucket/…")
    return text


def expect_local(text: str, expected: str = "expected a path on a disk, not an address") -> str:
    """`text`, if it is a path on a disk. Raises ConfigError, which does not repeat an address."""
    refuse_credentials(text)
    outside = text.split("!/")[0]  # what lies in an archive may be called anything
    if _BEGINS_LIKE_ONE.match(outside) or _LOST_A_SLASH.search(outside) or "://" in outside:
        raise ConfigError(f"{shown(outside)}: {expected}")
    if _USER.match(outside) and not os.path.lexists(outside):
        raise ConfigError(f"…@…: {expected}; for a file of that name write ./ before it, and make it first")
    return text


def shown(text: str) -> str:
    """What may be said of an address that is refused: its scheme."""
    found = _ADDRESS.search(text) or _BEGINS_LIKE_ONE.match(text)
    return f"{next(scheme for scheme in found.groups() if scheme)}://…" if found else "…"


def mask(text: str) -> str:
    """The text, with each address that holds credentials reduced to its scheme."""
    return _WORD.sub(lambda word: shown(word[0]) if holds_credentials(word[0].rstrip(".,:;!)")) else word[0], text)


def _secretive(scheme: str, rest: str) -> bool:
    host = re.split(r"[/\\\s]", rest, maxsplit=1)[0]
    path = rest[len(host) :]
    if "@" in host or "%40" in host or _TOKEN.search(rest):
        return True
    if host.startswith("…"):
        return False  # masked already
    if scheme.lower() in SCHEMES:
        return not is_bucket(re.split("[?#]", host)[0])
    return not _HOST.fullmatch(re.split("[?#,;]", host)[0]) or (":" in host and "@" in path)
