"""ZIP archives are read where they lie, give what the unpacked tree gives, and cannot harm whoever points octfm at
them."""

import struct
import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octfm.catalog.catalog import Catalog, CatalogError
from octfm.catalog.scan import scan
from octfm.errors import ReadError
from octfm.formats import optovue, read_volume
from octfm.formats.declared import Declared, declared_for_dicom, read_declared
from octfm.formats.reasons import REASONS
from octfm.io import archive as archives
from octfm.io.archive import is_folder, list_folder, open_archive, open_file, unpack
from octfm.phantom import DEFAULT_SCANNERS, write_phantom
from octfm.store.prepare import prepare
from octfm.volume.preprocessing import Preprocessing
from support.command_line import octfm_here
from support.dicom_files import write_oct_dicom
from support.examples import examples
from support.vendor_files import write_images
from support.volumes import telling_voxels

SIZE = (8, 64, 48)
SPACING_MM = (0.12, 0.0039, 0.0115)


@pytest.fixture(scope="module")
def cohorts(tmp_path_factory) -> tuple[Path, Path]:
    """The same cohort with every kind of defect, as a tree and with one ZIP archive per scanner."""
    folder = tmp_path_factory.mktemp("cohorts")
    return (
        write_phantom(folder / "tree", 13, 4, size=SIZE, defects=1.0, workers=1),
        write_phantom(folder / "zipped", 13, 4, size=SIZE, defects=1.0, workers=1, zipped=True),
    )


@pytest.fixture(scope="module")
def image(tmp_path_factory) -> bytes:
    voxels = np.random.default_rng(0).integers(0, 255, (4, 32, 36), dtype=np.uint8)
    return write_oct_dicom(
        tmp_path_factory.mktemp("image") / "a.dcm", voxels, SPACING_MM, sop_instance_uid="1.2.3"
    ).read_bytes()


def outcomes(catalog: Catalog, root: Path) -> list[tuple]:
    """Every file with all that is said about it, as if archives were folders."""

    def place(uri: str) -> str:
        return uri.removeprefix(str(root)).removeprefix("/retinal_oct/structural_oct").replace(".zip!", "")

    accepted = [
        (
            place(a.uri),
            "",
            a.sop_instance_uid,
            a.laterality,
            a.shape,
            a.spacing_mm,
            a.split,
            tuple(a.participant_labels),
            a.flags,
        )
        for a in catalog.acquisitions
    ]
    return sorted(accepted + [(place(r.uri), r.code, r.bytes) for r in (*catalog.rejects, *catalog.skipped)])


def test_archives_unpacked_or_not_and_the_plain_tree_give_one_catalog(cohorts, tmp_path):
    tree, zipped = cohorts
    assert {path.name for path in (zipped / "retinal_oct" / "structural_oct").iterdir()} == {
        f"{name}.zip" for name in DEFAULT_SCANNERS
    }
    plain, in_place, extracted = scan(tree), scan(zipped), scan(zipped, extract=tmp_path / "unpacked")
    assert outcomes(plain, tree) == outcomes(in_place, zipped)
    base = tmp_path / "unpacked" / "retinal_oct" / "structural_oct"
    assert outcomes(extracted, base) == outcomes(plain, tree)
    assert all(Path(a.uri).is_file() and a.uri.startswith(str(base)) for a in extracted.acquisitions)
    assert scan(zipped, extract=tmp_path / "unpacked") == extracted, "what is unpacked already is kept"
    assert scan(zipped, workers=2) == in_place and Catalog.load(in_place.save(tmp_path / "out")) == in_place


@pytest.mark.slow
def test_a_store_prepared_from_archives_equals_one_from_the_tree(cohorts, tmp_path):
    small = Preprocessing(image_size=(8, 64, 48), target_spacing=(0.9, 0.03, 0.15))
    stores = []
    for root in cohorts:
        catalog = scan(root)
        catalog = Catalog(catalog.root, catalog.acquisitions[:4], ())
        stores.append(prepare(catalog, tmp_path / root.name, small, workers=1, progress=False))
    first, second = ({row.acquisition: row.checksum for row in store.rows} for store in stores)
    assert first == second and len(first) == 4
    assert all("/heidelberg_spectralis.zip!/" in row.uri for row in stores[1].rows)


def write_zip(path: Path, members: dict[str, bytes], compression=zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # duplicate names
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content, compression)
    return path


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_members_are_read_like_files(tmp_path, image, compression):
    plain = tmp_path / "plain.dcm"
    plain.write_bytes(image)
    path = write_zip(tmp_path / "x.zip", {"1001/scan.dcm": image, "notes.txt": b"hello"}, compression)
    volume = read_volume(f"{path}!/1001/scan.dcm")
    assert np.array_equal(volume.voxels, read_volume(plain).voxels) and volume.source == f"{path}!/1001/scan.dcm"
    with pytest.raises(ReadError, match="no such member"):
        read_volume(f"{path}!/1001/absent.dcm")
    plain.unlink()
    catalog = scan(tmp_path)
    assert [a.uri for a in catalog.acquisitions] == [f"{path}!/1001/scan.dcm"] and catalog.companions == 1


def test_the_header_of_a_stored_member_is_read_without_reading_its_pixels(tmp_path, image, monkeypatch):
    path = write_zip(tmp_path / "x.zip", {"a.dcm": image}, zipfile.ZIP_STORED)
    monkeypatch.setattr(archives, "_content", lambda *_: pytest.fail("the whole member was read"))
    assert len(scan(tmp_path).acquisitions) == 1
    with open_file(f"{path}!/a.dcm") as stream:
        assert stream.seek(-4, 2) == len(image) - 4 and stream.read() == image[-4:]
        assert stream.seek(128) == 128 and stream.read(4) == b"DICM"


def test_an_archive_with_its_own_tables_is_joined_to_them(tmp_path, image):
    manifest = "person_id\tlaterality\tfilepath\n77\tR\t/retinal_oct/structural_oct/a.dcm\n"
    people = "person_id\trecommended_split\n77\ttest\n"
    members = {
        "retinal_oct/structural_oct/a.dcm": image,
        "retinal_oct/manifest.tsv": manifest.encode(),
        "participants.tsv": people.encode(),
    }
    write_zip(tmp_path / "all.zip", members)
    (row,) = scan(tmp_path).acquisitions
    assert (row.participant, row.split) == ("77", "test") and "not_in_manifest" not in row.flags


# ---- hostile archives
# ------------------------------------------------------------------------------------------------------------

HOSTILE = [
    "../escaped.dcm",
    "a/../../escaped.dcm",
    "/etc/escaped.dcm",
    "//server/share/escaped.dcm",
    "..\\escaped.dcm",
    "a\\..\\..\\escaped.dcm",
    "C:\\escaped.dcm",
    "c:escaped.dcm",
    "a/..",
    "..",
    "line\nbreak.dcm",
    "bell\x07.dcm",
    "x" * 300 + ".dcm",
    "a/" * 600 + "deep.dcm",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_names_that_leave_the_archive_are_refused_by_code(tmp_path, image, name):
    (tmp_path / "data").mkdir()
    write_zip(tmp_path / "data" / "x.zip", {name: image, "good.dcm": image})
    catalog = scan(tmp_path / "data", extract=tmp_path / "out")
    assert [Path(a.uri) for a in catalog.acquisitions] == [tmp_path / "out" / "x" / "good.dcm"]
    (reject,) = catalog.rejects
    assert reject.code == "unsafe_member" and reject.sentence.isprintable()
    assert set(tmp_path.rglob("*.dcm")) == {tmp_path / "out" / "x" / "good.dcm"}


names = st.lists(
    st.sampled_from(
        ["..", ".", "a", "b.dcm", "/", "\\", "//", "C:", "\0", "\n", "!", "!/", " ", "é", "\u202e", "~", "con", "..."]
    ),
    min_size=1,
    max_size=7,
).map("".join) | st.text(min_size=1, max_size=40)


@settings(max_examples=examples(150))
@given(given_names=st.lists(names.filter(lambda name: not name.endswith(("/", "\\"))), min_size=1, max_size=4))
def test_no_name_whatever_writes_outside_or_is_lost(tmp_path_factory, given_names):
    """Each member is either refused with a known code or unpacked below the folder, and readable under its uri."""
    folder = tmp_path_factory.mktemp("hostile")
    try:
        write_zip(folder / "x.zip", dict.fromkeys(given_names, b"content"))
        for name in set(given_names):
            name.encode()
    except UnicodeEncodeError:
        return  # lone surrogates cannot be written
    archive = open_archive(folder / "x.zip")
    with zipfile.ZipFile(folder / "x.zip") as written:
        assert len(archive.members) + len(archive.refused) == len(written.infolist())
    assert all(refused.code in REASONS and refused.sentence.isprintable() for refused in archive.refused)
    target = folder / "deep" / "er" / "out"
    unpacked = unpack(archive, target)
    assert len(unpacked) == len(archive.members)
    before = {folder, folder / "x.zip", folder / "deep", folder / "deep" / "er"}
    for path in set(folder.rglob("*")) - before:
        assert path.is_relative_to(target) and not path.is_symlink()
    # Folders as well, the top one among them.
    for place in [path for path in (target, *target.rglob("*")) if path.is_dir()]:
        uri = str(place).replace(str(target), f"{folder / 'x.zip'}!", 1)
        assert is_folder(uri) and [name.rpartition("/")[2] for name in list_folder(uri)] == sorted(
            path.name for path in place.iterdir() if path.is_file()
        )
    for uri, path in unpacked.items():
        assert not is_folder(uri)
        assert path.resolve().is_relative_to(target.resolve()) and path.read_bytes() == b"content"
        with open_file(uri) as stream:
            assert stream.read() == b"content"


def test_names_that_are_there_twice_links_and_clashes_are_refused(tmp_path, image):
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("twice.dcm", "twice.dcm", "./twice.dcm", "a", "a/inside.dcm"):
            archive.writestr(name, image)
        link = zipfile.ZipInfo("link.dcm")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    catalog = scan(tmp_path)
    assert [a.uri for a in catalog.acquisitions] == [f"{path}!/a/inside.dcm"]
    assert [r.code for r in catalog.rejects] == ["unsafe_member"] * 5


def patched(path: Path, name: str, *, central: dict[int, int], local: dict[int, int] | None = None) -> None:
    """Overwrite little-endian 32-bit fields (by offset) of the central and local headers of a member."""
    content = bytearray(path.read_bytes())
    at = content.rindex(b"PK\x01\x02", 0, content.rindex(name.encode()))
    for offset, value in central.items():
        struct.pack_into("<I", content, at + offset, value)
    start = struct.unpack_from("<I", content, at + 42)[0]
    for offset, value in (local or {}).items():
        struct.pack_into("<I", content, start + offset, value)
    path.write_bytes(content)


def codes(root: Path) -> dict[str, str]:
    return {Path(r.uri).name: r.code for r in scan(root, workers=0).rejects}  # where the test watches


def test_decompression_bombs_are_refused_before_they_inflate(tmp_path, image, monkeypatch):
    monkeypatch.setattr(archives, "RATIO_FROM_BYTES", 2**20)
    monkeypatch.setattr(archives, "MAX_MEMBER_BYTES", 2**22)
    opened = []
    inflate = archives._content
    monkeypatch.setattr(
        archives,
        "_content",
        lambda file, start, member, uri: opened.append(member.filename) or inflate(file, start, member, uri),
    )
    noise = np.random.default_rng(0).bytes(2**22 + 1)
    write_zip(tmp_path / "x.zip", {"good.dcm": image, "zeros.dcm": bytes(2**21), "large.dcm": noise})
    assert codes(tmp_path) == {"zeros.dcm": "decompression_bomb", "large.dcm": "decompression_bomb"}
    assert set(opened) == {"good.dcm"}


def test_a_member_that_lies_about_its_size_inflates_no_further(tmp_path, image):
    path = write_zip(tmp_path / "x.zip", {"good.dcm": image, "liar.dcm": image + bytes(50_000_000)})
    patched(path, "liar.dcm", central={24: 1000}, local={22: 1000})
    assert codes(tmp_path) == {"liar.dcm": "decompression_bomb"}
    with pytest.raises(ReadError) as error:
        read_volume(f"{path}!/liar.dcm")
    assert error.value.code == "decompression_bomb"


def test_members_that_share_their_bytes_are_refused(tmp_path, image):
    """The quine-like bomb: thousands of directory entries that point at one kernel."""
    path = write_zip(tmp_path / "x.zip", {"good.dcm": image, "one.dcm": image, "two.dcm": image})
    start = open_archive(path).members["one.dcm"].header_offset
    patched(path, "two.dcm", central={42: start})
    assert codes(tmp_path) == {"one.dcm": "decompression_bomb", "two.dcm": "decompression_bomb"}


def test_damaged_and_unreadable_archives_have_a_code(tmp_path, image):
    whole = write_zip(tmp_path / "cut.zip", {"good.dcm": image}).read_bytes()
    (tmp_path / "cut.zip").write_bytes(whole[: len(whole) // 2])
    write_zip(tmp_path / "lzma.zip", {"exotic.dcm": image}, zipfile.ZIP_LZMA)
    rotten = write_zip(
        tmp_path / "rotten.zip",
        {"pixels.dcm": image, "whole.dcm": image.replace(b"1.2.3", b"1.2.4")},
        zipfile.ZIP_STORED,
    )
    content = bytearray(rotten.read_bytes())
    content[content.index(image[:200]) + len(image) - 1] ^= 1
    rotten.write_bytes(content)
    write_zip(tmp_path / "secret.zip", {"secret.dcm": image})
    patched(tmp_path / "secret.zip", "secret.dcm", central={6: 0x00010014 | 20})
    write_zip(tmp_path / "nested.zip", {"inner.zip": whole})
    (tmp_path / "dicom.zip").write_bytes(image.replace(b"1.2.3", b"1.2.5"))
    catalog = scan(tmp_path)
    assert {Path(r.uri).name: r.code for r in catalog.rejects} == {
        "cut.zip": "damaged_archive",
        "exotic.dcm": "unsupported_member",
        "secret.dcm": "unsupported_member",
        "inner.zip": "not_dicom",
    }
    assert {Path(a.uri).name for a in catalog.acquisitions} == {"pixels.dcm", "whole.dcm", "dicom.zip"}, (
        "content decides, not the name"
    )
    with pytest.raises(
        ReadError, match="checksum"
    ) as error:  # pixels of stored members are looked at when they are read
        read_volume(f"{rotten}!/pixels.dcm")
    assert error.value.code == "damaged_archive"


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_mutated_archives_are_read_or_refused_with_a_code(tmp_path, compression):
    """Bytes flipped, cut or doubled, half of them in the directory: every outcome is a member's bytes or a known
    reason."""
    content = {f"{i}/{'long' * i}.dcm": bytes([i]) * 40 + b"some content" * i for i in range(5)}
    whole = write_zip(tmp_path / "whole.zip", content, compression).read_bytes()
    directory = whole.index(b"PK\x01\x02")
    rng = np.random.default_rng(0)
    path, refused = tmp_path / "mutated.zip", 0
    for turn in range(400):
        mutated = bytearray(whole)
        for _ in range(rng.integers(1, 4)):
            low = directory if rng.random() < 0.5 else 0
            mutated[rng.integers(low, len(mutated))] = rng.integers(256)
        if turn % 10 == 0:
            mutated = mutated[: rng.integers(len(mutated))]
        path.write_bytes(b"PK" + mutated[2:])
        archives._listed.cache_clear()  # all of these have one size and nearly one date
        try:
            archive = open_archive(path)
        except ReadError as error:
            assert error.code == "damaged_archive"
            refused += 1
            continue
        assert all(entry.code in REASONS for entry in archive.refused)
        for member in archive.members:
            try:
                with open_file(f"{path}!/{member}", whole=True) as stream:
                    assert stream.read() in content.values(), "the checksum holds, so it is one of the originals"
            except ReadError as error:
                assert error.code in REASONS
                refused += 1
    assert refused > 100


def test_the_command_unpacks_first_where_it_is_asked_to(tmp_path, image):
    (tmp_path / "data").mkdir()
    write_zip(tmp_path / "data" / "x.zip", {"1001/a.dcm": image})
    for more, named in (
        ([], tmp_path / "data" / "x.zip!/1001/a.dcm"),
        (["--extract", "out"], tmp_path / "out" / "x" / "1001" / "a.dcm"),
    ):
        code, _, err = octfm_here("scan", "data", "--workers", "0", "--no-images", *more, cwd=tmp_path)
        assert code == 0, err
        assert [a.uri for a in Catalog.load(tmp_path / "catalog").acquisitions] == [str(named)]
        assert (tmp_path / "out").exists() is bool(more)


def test_bscans_at_the_top_of_an_archive_are_a_volume(tmp_path):
    voxels = np.random.default_rng(0).integers(0, 255, (5, 40, 36), dtype=np.uint8)
    (tmp_path / "data").mkdir()
    write_images(tmp_path / "P1001_OD", voxels)
    images = {path.name: path.read_bytes() for path in (tmp_path / "P1001_OD").iterdir()}
    write_zip(tmp_path / "data" / "P1001_OD.zip", images)
    for extract in (None, tmp_path / "out"):
        catalog = scan(tmp_path / "data", nominal_spacing_mm=SPACING_MM, extract=extract, workers=0)
        (found,) = catalog.acquisitions
        assert (found.participant, found.laterality, catalog.rejects) == ("P1001", "R", ())
        assert np.array_equal(read_volume(found.uri, spacing_mm=SPACING_MM).voxels, voxels)


def test_the_sidecar_of_a_dicom_in_an_archive_counts_in_place_and_unpacked(tmp_path):
    path = write_oct_dicom(tmp_path / "a.dcm", telling_voxels(), SPACING_MM, laterality=None, participant=None)
    stated = b'{"laterality": "OS", "participant": "p7"}'
    (tmp_path / "data").mkdir()
    write_zip(tmp_path / "data" / "x.zip", {"a.dcm": path.read_bytes(), "a.json": stated})
    for extract in (None, tmp_path / "out"):
        (found,) = scan(tmp_path / "data", extract=extract, workers=0).acquisitions
        assert (found.participant, found.laterality, found.flags) == ("p7", "L", ())
        assert read_volume(found.uri).laterality == "L"


def test_what_a_damaged_member_states_beside_a_scan_is_not_believed(tmp_path):
    """Its bytes may still be numbers, only others."""
    stated = b'{"spacing_mm": [0.12, 0.0039, 0.0115]}'
    export = b"Window Height=8\nScan Length=6\nScan Usage=4\n"
    members = {"a.npy": b"", "a.json": stated, "b.oct": bytes(4 * 8 * 6 * 4), "b.txt": export}
    path = write_zip(tmp_path / "x.zip", members)
    assert read_declared(f"{path}!/a.npy") == declared_for_dicom(f"{path}!/a.npy") != Declared()
    assert optovue.open_bscans(f"{path}!/b.oct").shape == (4, 8, 6)
    for name in ("a.json", "b.txt"):
        patched(path, name, central={16: 0})
    assert read_declared(f"{path}!/a.npy") == declared_for_dicom(f"{path}!/a.npy") == Declared()
    with pytest.raises(ReadError, match=r"b\.txt"):
        optovue.open_bscans(f"{path}!/b.oct")


def test_an_archive_made_again_is_unpacked_again(tmp_path):
    """Its members may have the sizes of the old ones: uncompressed volumes always do."""
    for content in (b"old voxels", b"new voxels"):
        write_zip(tmp_path / "x.zip", {"a.dcm": content})
        (path,) = unpack(open_archive(tmp_path / "x.zip"), tmp_path / "out").values()
        assert path.read_bytes() == content


def test_two_processes_may_unpack_one_archive(tmp_path):
    """As two scans do that are started at once."""
    write_zip(tmp_path / "x.zip", {f"{n}.dcm": bytes([n]) * 2**20 for n in range(20)})
    with ThreadPoolExecutor(8) as pool:
        several = list(pool.map(lambda _: unpack(open_archive(tmp_path / "x.zip"), tmp_path / "out"), range(8)))
    for found in several:
        assert len(found) == 20 and all(path.read_bytes() == bytes([int(path.stem)]) * 2**20 for path in found.values())
    assert not list((tmp_path / "out").glob(".*"))


def test_extract_refuses_a_folder_that_the_next_scan_would_see(tmp_path, image):
    write_zip(tmp_path / "x.zip", {"a.dcm": image})
    with pytest.raises(CatalogError, match="expected a folder outside"):
        scan(tmp_path, extract=tmp_path / "unpacked")
    assert not (tmp_path / "unpacked").exists()


def test_extract_refuses_what_does_not_fit_on_the_disk(tmp_path, image, monkeypatch):
    (tmp_path / "data").mkdir()
    write_zip(tmp_path / "data" / "x.zip", {"a.dcm": image})
    monkeypatch.setattr(
        "octfm.catalog.scan.shutil.disk_usage", lambda path: type("Usage", (), {"free": len(image) - 1})
    )
    with pytest.raises(CatalogError, match=f"{len(image):,} bytes to unpack, {len(image) - 1:,} free"):
        scan(tmp_path / "data", extract=tmp_path / "out")


@pytest.mark.parametrize(("one", "other"), [("a.zip", "a.ZIP"), ("a.zip", "a/b.zip")])
def test_archives_do_not_unpack_over_each_other(tmp_path, one, other):
    for place, name in ((one, "b/1.dcm"), (other, "b/1.dcm" if "/" not in other else "1.dcm")):
        (tmp_path / "data" / place).parent.mkdir(parents=True, exist_ok=True)
        voxels = np.random.default_rng(len(place)).integers(0, 255, (4, 40, 36), dtype=np.uint8)
        file = write_oct_dicom(tmp_path / "1.dcm", voxels, SPACING_MM, participant=place)
        with zipfile.ZipFile(tmp_path / "data" / place, "w") as archive:
            archive.write(file, name)
    assert len(scan(tmp_path / "data", workers=0).acquisitions) == 2
    with pytest.raises(CatalogError, match="would both unpack into"):
        scan(tmp_path / "data", workers=0, extract=tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())
