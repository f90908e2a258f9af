"""Which images of a folder are B-scans of one volume: those that a HEYEX XML there names, else all images of a folder with nothing else."""

from octfm.errors import ReadError
from octfm.formats.heyex_xml import HEAD_BYTES, MAX_BYTES, fits, named_images
from octfm.formats.image_folder import SUFFIXES, is_image
from octfm.io.archive import read_start
from octfm.io.location import Location

MOST_STRANGERS = 8
"""Images per file of another kind from which on a folder is one volume all the same."""


def join_images(files: list[Location], companions: list[Location]) -> None:
    """In place: images that are B-scans of a volume go to `companions`, and the folder that is their volume takes their place in `files`.

    The name decides only what is looked at: an image without its usual ending is a file of its own, and then no volume.
    """
    folders: dict[Location, list[Location]] = {}
    for path in files:
        folders.setdefault(path.parent, []).append(path)
    for folder, inside in folders.items():
        images = [path for path in inside if path.suffix.lower() in SUFFIXES and is_image(path)]
        if not images:
            continue
        exports = [path for path in inside if path.suffix.lower() == ".xml"]
        named = set().union(*(_named_by(path) for path in exports))
        parts = [path for path in images if path.name.lower() in named]
        # Few strangers do not make single images of B-scans: they are looked at as files of their own.
        few_others = not named and len(images) > MOST_STRANGERS * (len(inside) - len(images))
        if len(images) > 1 and (len(images) == len(inside) or few_others):
            parts = images
            files.append(folder)
        taken = set(parts)
        files[:] = [path for path in files if path not in taken]
        companions.extend(parts)


def _named_by(path: Location) -> set[str]:
    try:
        content = read_start(path, MAX_BYTES)
    except (OSError, ReadError):
        return set()
    return named_images(content) if fits(content[:HEAD_BYTES]) else set()
