"""Which images of a folder are B-scans of one volume: those that a HEYEX XML there names, else all images of a folder with nothing else."""

from octfm.data.archive import file_size, open_file, read_start, split_uri
from octfm.data.location import Location
from octfm.data.readers.heyex_xml import HEAD_BYTES, MAX_BYTES, fits, named_images
from octfm.data.readers.image_folder import SUFFIXES
from octfm.data.readers.images import MAGIC, several_pages
from octfm.errors import ReadError


def join_images(files: list[Location], companions: list[Location]) -> None:
    """In place: images that are B-scans of a volume go to `companions`, and the folder that is their volume takes their place in `files`.

    The name decides only what is looked at: an image without its usual ending is a file of its own, and then no volume.
    """
    folders: dict[Location, list[Location]] = {}
    for path in files:
        folders.setdefault(path.parent, []).append(path)
    for folder, inside in folders.items():
        images = [path for path in inside if path.suffix.lower() in SUFFIXES and _is_image(path)]
        if not images:
            continue
        exports = [path for path in inside if path.suffix.lower() == ".xml"]
        named = set().union(*(_named_by(path) for path in exports))
        parts = [path for path in images if path.name.lower() in named]
        if len(images) == len(inside) > 1:
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


def _is_image(path: Location) -> bool:
    """One image, not a TIFF that is a volume by itself."""
    try:
        if split_uri(path) and file_size(path) > MAX_BYTES:
            return False  # it would have to be inflated here; a B-scan is never so large
        with open_file(path) as file:
            return file.read(8).startswith(MAGIC) and not several_pages(file)
    except (OSError, ReadError):
        return False
