"""Validate addresses in options and settings; refuse those with credentials, and mask them in messages.

What users type ends up in terminals, logs, catalogs and config.yaml. So an address that contains a key, a password or a
token is refused before anything is written, and never repeated.
"""

import os
import re

from octfm.errors import ConfigError

SCHEMES = ("s3", "gs")
"""Schemes of the buckets that octfm reads and writes."""
_KNOWN = (
    "s3|gs|s3a|s3n|gcs|file|https?|ftps?|sftp|ssh|scp|hdfs|webhdfs|az|azure|abfss?|wasbs?|adl|hf|r2|b2|oss|dbfs|"
    "webdav|smb|nfs"
)
"""Schemes that mark an address even without slashes after the colon: no folder's name begins with them."""

_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):[/\\]+")
_WORD = re.compile(_ADDRESS.pattern + r"[^\s'\"<>]*")
_BEGINS_LIKE_ONE = re.compile(rf"(?i)\s*(?:({_KNOWN}):|([A-Za-z][A-Za-z0-9+.-]+):[/\\])")
_LOST_A_SLASH = re.compile(rf"(?i)[/\\]({_KNOWN}):(?:[/\\]|$)")
"""An address that was treated as a path: s3://bucket becomes /folder/s3:/bucket."""
_USER = re.compile(r"\s*(?:[/\\]{2,}[^/\\]*@|[^/\\@]{2,}:[^@]*@)")
"""Credentials without a scheme: //key:secret@bucket or key:secret@bucket."""
_WITHOUT_SLASHES = re.compile(rf"(?i)\s*({_KNOWN}):[^/\\]*(@|%40)")
_HOST = re.compile(r"[A-Za-z0-9._\[\]-]*(:\d*)?")
_BUCKET = re.compile(r"[A-Za-z0-9._-]*|arn:[A-Za-z0-9:-]+")
_BEGINS_A_QUERY = r"(?i)(?:[?&;#]|%(?:25)*(?:3f|26|3b|23))"
"""Also percent-encoded, once or, as in the addresses that libraries print, again."""
_TOKEN = re.compile(
    _BEGINS_A_QUERY + r"[^=&?/]*(sig|token|secret|key|credential|passw|pwd|auth|sas|session)[^=&/]*(=|%(?:25)*3d)"
)
_QUERY = re.compile(_BEGINS_A_QUERY + r"[^=&?/\s]*(=|%(?:25)*3d)")
"""A query of a web address. octfm needs none, and any name may hold a token: ?pass=, ?jwt=, ?code=."""

_NAME = re.compile(r"(?:--)?[a-z][a-z0-9_.-]*=")
"""Before the value of an option or a setting in one word: data.store=, --store=."""


def is_bucket(name: str) -> bool:
    """Whether this is a valid bucket name, without a user or key before it."""
    return _BUCKET.fullmatch(name) is not None


def holds_credentials(text: str) -> bool:
    """Whether an address in this text contains a user, key, password or token, plain or percent-encoded."""
    if _WITHOUT_SLASHES.match(text):
        return True
    if ":/" not in text and ":\\" not in text:
        return False  # the search below takes time in the square of the length of a word
    return any(_has_secret(found[1], text[found.end() :]) for found in _ADDRESS.finditer(text))


def refuse_credentials(text: str, option: str = "") -> None:
    """Raises ConfigError, without repeating the text, if an address in it contains credentials. `option`: the word
    before it on the command line."""
    if holds_credentials(text):
        where = f"{option} {shown(text)}".lstrip()
        raise ConfigError(
            f"{where}: the address holds credentials, which would end up in catalogs and logs; put them into the "
            "environment (AWS_*, GOOGLE_APPLICATION_CREDENTIALS) and give the address without them"
        )


def path_text(where: object) -> str:
    """The path that a str or an os.PathLike holds. Raises TypeError for anything else: the text of an object, such as
    None, would name a file or a folder in the current one; ConfigError for an empty text."""
    text = os.fspath(where) if isinstance(where, str | os.PathLike) else None
    if not isinstance(text, str):
        raise TypeError(f"expected a path, got {type(where).__name__}")
    if not text:
        raise ConfigError("expected a path, got an empty text; write . for the current folder")
    return text


def in_home(text: str) -> str:
    """`text`, or the path in the home folder that it names by ~/. A shell leaves --out=~/runs and data.store=~/prepared
    as they are, and a folder called ~ would be made, which nobody can delete without danger."""
    return os.path.expanduser(text) if text == "~" or text.startswith("~/") else text  # noqa: PTH111


def refuse_windows(text: str) -> None:
    """Raises ConfigError for a path of Windows: here it would name a file in the current folder."""
    if (drive := re.match(r"([A-Za-z]):", text)) and not os.path.lexists(text):
        raise ConfigError(f"{text}: a path of Windows; in WSL write /mnt/{drive[1].lower()}/… instead")


def expect_place(text: str) -> str:
    """`text`, its ~/ replaced, if it is a path on a disk, s3://bucket/… or gs://bucket/…. Raises ConfigError, which
    does not quote it."""
    refuse_credentials(text)
    scheme, _, rest = text.partition("://")
    if scheme not in SCHEMES:
        return expect_local(text, "expected a local path, s3://bucket/… or gs://bucket/…")
    if "?" in rest.split("!/")[0] or not is_bucket(rest.split("/")[0]):
        raise ConfigError(f"{scheme}://…: expected the name of a bucket and a path in it, {scheme}://bucket/…")
    return text


def expect_local(text: str, expected: str = "expected a path on a disk, not an address") -> str:
    """`text`, its ~/ replaced, if it is a path on a disk. Raises ConfigError, which does not quote it, also for an
    empty text."""
    refuse_credentials(text)
    outside = text.split("!/")[0]  # members of archives may have any name
    if _BEGINS_LIKE_ONE.match(outside) or _LOST_A_SLASH.search(outside) or "://" in outside:
        raise ConfigError(f"{shown(outside)}: {expected}")
    if _USER.match(outside) and not os.path.lexists(outside):
        raise ConfigError(f"…@…: {expected}; for a file of that name, create it and write ./ before it")
    return in_home(path_text(text))


def shown(text: str) -> str:
    """The part of a refused address that a message may show: its scheme, and the option or setting that it is for."""
    found, name = _ADDRESS.search(text) or _BEGINS_LIKE_ONE.match(text), _NAME.match(text)
    scheme = f"{next(scheme for scheme in found.groups() if scheme)}://…" if found else "…"
    return f"{name[0]}{scheme}" if name else scheme


def mask(text: str) -> str:
    """The text with every address that contains credentials reduced to its scheme."""
    return _WORD.sub(lambda word: shown(word[0]) if holds_credentials(word[0].rstrip(".,:;!)")) else word[0], text)


def mask_path(path: str) -> str:
    """The path of a file that cannot be opened, for a message; as `mask`, also where an address lost its slashes or its
    scheme, unless a file has this name."""
    if os.path.lexists(path.split("!/")[0]):
        return mask(path)
    if _WITHOUT_SLASHES.match(path):
        return shown(path)
    return "…@…" if _USER.match(path) and mask(path) == path else mask(path)


def _has_secret(scheme: str, rest: str) -> bool:
    """Whether the part of an address after its scheme contains credentials."""
    host = re.split(r"[/\\\s]", rest, maxsplit=1)[0]
    path = rest[len(host) :]
    web = scheme.lower() in ("http", "https")
    if "@" in host or "%40" in host or (_QUERY if web else _TOKEN).search(rest):
        return True
    if host.startswith("…"):
        return False  # masked already
    if scheme.lower() in SCHEMES:
        return not is_bucket(re.split("[?#]", host)[0])
    return not _HOST.fullmatch(re.split("[?#,;]", host)[0]) or (":" in host and "@" in path)
