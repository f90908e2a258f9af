"""Locations in options and settings: credentials and unknown schemes are refused alike, masked alike, before
anything is written."""

import inspect
import string
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octfm import addresses
from octfm.catalog.columns import TableError
from octfm.catalog.labels import read_labels
from octfm.catalog.participants.pseudonyms import read_key
from octfm.cli import options
from octfm.cli.main import app
from octfm.config import Config, dump, load
from octfm.encoder.embed import embed_with
from octfm.errors import ConfigError, OctfmError
from octfm.formats import read_volume
from octfm.io.location import BucketPath, local_path, location
from octfm.layers.corrections import read_corrections
from octfm.models.vit3d import ViTConfig
from octfm.pretraining.settings import PretrainConfig, load_config, stored_config
from octfm.store.exclusion import named_lines
from octfm.store.loader import DataConfig
from octfm.tasks.finetune_settings import FinetuneConfig
from octfm.tasks.segment_settings import SegmentConfig
from octfm.volume.preprocessing import Preprocessing
from support.command_line import invoke, octfm_here
from support.small_store import small_store

VERBS = typer.main.get_command(app).commands
OPTIONS = [
    (verb, option) for verb, command in sorted(VERBS.items()) for option in command.params if option.name != "help"
]
REQUIRED = {
    "phantom": ["new"], "scan": ["here"], "prepare": ["catalog"], "doctor": ["vit_s"], "pretrain": ["vit_s"], "bench": ["vit_s"],
    "watch": ["run"], "embed": ["run"], "export": ["run", "--out", "new"], "probe": ["run"], "finetune": ["study_group_linear"],
    "leaderboard": ["run", "--store", "store"], "trust": ["run", "--store", "store"], "report": ["run"], "compare": ["a", "b"],
    "view": ["file"], "card": ["run"],
}  # fmt: skip

secrets = st.text(string.ascii_letters + string.digits + "/+=~%&#?:$!*'()[];,-._\"\\ ", min_size=1, max_size=30).map(
    lambda text: f"kE7y{text}x9Qz"
)
schemes = st.sampled_from(
    ["s3", "S3", "gs", "s3a", "https", "http", "file", "ftp", "hdfs", "abfs", "memory", "new-store"]
)
FORMS = (
    "{scheme}://AKIA:{secret}@bucket/x", "{scheme}://:{secret}@bucket", "{scheme}:/AKIA:{secret}@bucket/x", "./{scheme}://AKIA:{secret}@b",
    "runs/{scheme}:/AKIA:{secret}@b", "{scheme}://AKIA%3A{plain}%40bucket/x", "{scheme}://{plain}@bucket/x",
    "{scheme}://bucket/x?token={secret}", "{scheme}://bucket/x?a=b&X-Amz-Signature={secret}", " {scheme}://AKIA:{secret}@bucket",
    "x.zip!/{scheme}://AKIA:{secret}@bucket",
)  # fmt: skip


@st.composite
def secretive(draw) -> tuple[str, str]:
    """An address, and the part of it that nobody may see."""
    scheme, secret = draw(schemes), draw(secrets)
    plain = "".join(char for char in secret if char.isalnum())
    form = draw(st.sampled_from(FORMS))
    return form.format(scheme=scheme, secret=secret, plain=plain), plain[:6] if "{plain}" in form else secret[:6]


@given(secretive())
@settings(max_examples=400)
def test_no_secret_passes_in_any_form(given_one):
    address, secret = given_one
    for check in (addresses.refuse_credentials, addresses.expect_place, addresses.expect_local, location, local_path):
        with pytest.raises(ConfigError) as caught:
            check(address)
        assert secret not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["pass", "jwt", "code", "bearer", "x", "tok%65n"])
def test_no_query_of_a_web_address_is_shown_whatever_it_is_called(name):
    text = f"403 for url https://host:8443/a/b?{name}=wJalrXUtnFEMI (try again)"
    assert addresses.mask(text) == "403 for url https://… (try again)"
    with pytest.raises(ConfigError):
        addresses.refuse_credentials(f"http://host/a?{name}=wJalrXUtnFEMI")
    assert addresses.mask("see https://host/a?") == "see https://host/a?"


@given(st.sampled_from(OPTIONS), secretive())
@settings(max_examples=150)
def test_no_option_of_any_verb_repeats_or_writes_a_secret(tmp_path_factory, option, given_one):
    """The real parser of the real command, with the address as the value of every option and argument there is."""
    (verb, parameter), (address, secret) = option, given_one
    words = (
        [*REQUIRED.get(verb, []), parameter.opts[-1], address] if parameter.param_type_name == "option" else [address]
    )
    _refused_and_nothing_written(tmp_path_factory.mktemp("here"), [verb, *words], secret)


def test_a_command_names_the_setting_or_option_whose_address_holds_a_key():
    for word in ("data.store=", "--store=", "--store "):
        done = invoke("pretrain", "vit_s", *f"{word}s3://AKIA:wJalrXUtnFEMI@bucket".split())
        assert str(done.exception).startswith(f"{word}s3://…: the address holds credentials")


@pytest.mark.parametrize(
    ("verb", "parameter"), OPTIONS, ids=lambda value: value if isinstance(value, str) else value.name
)
def test_every_option_refuses_a_key_in_an_address(tmp_path, verb, parameter):
    address = "s3://AKIA:wJalrXUtnFEMI@bucket/x"
    words = (
        [*REQUIRED.get(verb, []), parameter.opts[-1], address] if parameter.param_type_name == "option" else [address]
    )
    _refused_and_nothing_written(tmp_path, [verb, *words], "wJalrXUtnFEMI")


def _refused_and_nothing_written(folder: Path, words: list[str], secret: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = invoke(*words)
    assert isinstance(done.exception, ConfigError), done.output
    assert secret not in done.output + str(done.exception) and not list(folder.iterdir())


def parser_of(verb: str, option) -> object:
    """What the verb's function declares to parse the value, without what every place is checked for; or None."""
    function = inspect.unwrap(VERBS[verb].callback)
    annotation = inspect.signature(function, eval_str=True).parameters[option.name].annotation
    declared = (extra.parser for extra in getattr(annotation, "__metadata__", ()) if hasattr(extra, "parser"))
    parser = next(declared, None)
    return getattr(parser, "__wrapped__", parser)


def _settings(cls: type[Config], prefix: str = "") -> list[str]:
    from octfm.config import known_keys

    return known_keys(cls, prefix)


@pytest.mark.parametrize("cls", [PretrainConfig, FinetuneConfig, SegmentConfig, Preprocessing])
def test_no_setting_takes_an_address_with_a_key(tmp_path, cls):
    """In a file or as an override, whatever the setting is for; mistyped ones too."""
    for key in [*_settings(cls), "data.stroe", "nonsense"]:
        values: dict = {}
        table = values
        *sections, name = key.split(".")
        for section in sections:
            table = table.setdefault(section, {})
        table[name] = ["gs://AKIA:wJalrXUtnFEMI@bucket/x"]
        (tmp_path / "own.yaml").write_text(yaml.safe_dump(values))
        for source, overrides in ((tmp_path / "own.yaml", []), ({}, [f"{key}=s3://AKIA:wJalrXUtnFEMI@bucket"])):
            with pytest.raises(ConfigError, match=f"{key}(: |=).*credentials") as caught:
                load(cls, source, overrides)
            assert "wJalrXUtnFEMI" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["data: {store: 's3://AKIA:wJalrXUtnFEMI@b'", "a: [s3://AKIA:wJalrXUtnFEMI@b\nb: %", "s3://AKIA:wJalr@b: 5"]
)
def test_a_broken_file_of_settings_is_not_quoted(tmp_path, text):
    (tmp_path / "own.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "own.yaml")
    assert "wJalr" not in str(caught.value)


LOCAL = [
    (PretrainConfig, "ckpt_second_dir"), (PretrainConfig, "probe.labels"), (FinetuneConfig, "labels"), (SegmentConfig, "truth"),
]  # fmt: skip
PLACES = [
    (PretrainConfig, "data.store"), (PretrainConfig, "model.init"), (FinetuneConfig, "encoder"), (FinetuneConfig, "store"),
    (SegmentConfig, "encoder"), (SegmentConfig, "store"),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "key"), LOCAL + PLACES)
def test_settings_that_name_places_know_which(cls, key):
    """F6: ckpt_second_dir=s3://… was a folder called s3:, and passed for write-tested."""
    for wrong in ("s3:/bucket", "ftp://host/x", "file:///data", "S3://bucket", "gs:bucket", "C:\\data"):
        with pytest.raises(ConfigError, match=key):
            load(cls, {}, [f"{key}={wrong}"])
    for right in ("runs/a", "/data/user@host/a:b", "./s3"):
        assert right in dump(load(cls, {}, [f"{key}='{right}'"]))
    if (cls, key) in PLACES:
        assert "s3://bucket/a@b" in dump(load(cls, {}, [f"{key}=s3://bucket/a@b"]))
    else:
        with pytest.raises(ConfigError, match="not an address"):
            load(cls, {}, [f"{key}=s3://bucket/a"])


def test_an_error_of_a_settings_model_does_not_quote_what_it_got():
    wrong: Any = "s3://AKIA:wJalr@b"
    path: Any = Path(wrong)
    for make in (
        lambda: DataConfig(store=wrong),
        lambda: ViTConfig(init=wrong),
        lambda: ViTConfig(width=wrong),
        lambda: DataConfig(store=path),
    ):
        with pytest.raises(ConfigError, match="credentials") as caught:
            make()
        assert "wJalr" not in str(caught.value)


def test_checkpoints_of_before_are_read_without_their_addresses():
    old = PretrainConfig().model_dump(mode="json")
    old |= {"ckpt_second_dir": "s3://AKIA:wJalr@bucket"}
    old["data"] |= {"store": "prepared"}
    old["model"] |= {"init": "C:\\weights.pt"}
    read = stored_config(old)
    assert read.ckpt_second_dir is None and read.model.init is None and read.data.store == "prepared"


@pytest.mark.parametrize("address", ["s3://bucket/x", "gs://bucket", "s3:/bucket", "https://host/x", "file:///x"])
def test_no_folder_is_ever_called_s3(tmp_path, monkeypatch, address):
    """Every option and argument that names a path on a disk, of every verb."""
    monkeypatch.chdir(tmp_path)
    local = [(verb, option) for verb, option in OPTIONS if parser_of(verb, option) is local_path]
    assert len(local) > 25
    for verb, option in local:
        words = (
            [*REQUIRED.get(verb, []), option.opts[-1], address]
            if option.param_type_name == "option"
            else [address, address]
        )
        done = invoke(verb, *words, *(["--store", "x"] if verb == "leaderboard" else []))
        assert isinstance(done.exception, ConfigError) and "address" in str(done.exception), (
            verb,
            option.name,
            done.output,
        )
    for name in (Path(address), f"runs/{address}"):
        with pytest.raises(ConfigError):
            local_path(name)
    assert not list(tmp_path.iterdir())


def test_vectors_of_a_store_go_to_no_folder_called_s3(tmp_path, monkeypatch):
    """The option takes addresses for the vectors of files."""
    monkeypatch.chdir(tmp_path)
    done = invoke("embed", "run", "--store", "store", "--out", "s3://bucket/vectors")
    assert isinstance(done.exception, ConfigError) and "expected a path on a disk" in str(done.exception)
    with pytest.raises(ConfigError, match="expected a path on a disk"):
        embed_with(lambda voxels: voxels.mean((2, 3)), small_store(tmp_path / "store"), "s3://bucket/x", "mine")
    assert not (tmp_path / "s3:").exists()


def test_no_folder_is_ever_called_tilde(tmp_path, monkeypatch):
    """A shell leaves --out=~/runs and data.store=~/prepared as they are, and so does Python."""
    (tmp_path / "here").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")
    done = invoke("phantom", "~/clinic", "--participants", "1", "--size", "8x64x48")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "home/clinic").is_dir() and not list((tmp_path / "here").iterdir())
    for parse in (local_path, options.place, addresses.expect_place):
        assert str(parse("~/x")) == str(tmp_path / "home/x") and str(parse("a/~/x")) == "a/~/x"
    assert load(PretrainConfig, "vit_s", ["data.store=~/x"]).data.store == str(tmp_path / "home/x")
    scan = next((tmp_path / "home/clinic").rglob("*.dcm"))
    read = read_volume(scan.as_posix().replace(str(tmp_path / "home"), "~"), raster_only=False)
    assert read.source == str(scan)


def test_a_secret_key_and_tables_are_in_the_home_folder_too(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    read_key("~/key")
    assert (tmp_path / "key").is_file()
    for read in (read_labels, read_corrections, named_lines):
        with pytest.raises(OctfmError, match=str(tmp_path / "absent")):
            read("~/absent/table.csv")


class Entry:
    """An os.PathLike whose text is not its path, as of os.DirEntry."""

    def __init__(self, path: str):
        self.path = path

    def __fspath__(self) -> str:
        return self.path


@pytest.mark.parametrize("place", [location, local_path])
def test_only_what_is_a_path_names_a_place(place):
    """A store was written to a folder called None, and a DirEntry was looked for by its repr."""
    assert place(Entry("a/b")) == place("a/b") == Path("a/b")
    for odd in (None, 5, ["a"], b"a", Entry(b"a")):
        with pytest.raises(TypeError, match=f"expected a path, got {type(odd).__name__}"):
            place(odd)


def test_an_empty_text_is_no_path(tmp_path, monkeypatch):
    """Of a variable that is not set: embed "$SCANS" read all of the current folder, and embed --store "$STORE" another
    store than was meant."""
    monkeypatch.chdir(tmp_path)
    for place in (location, local_path, addresses.expect_place, read_volume):
        with pytest.raises(ConfigError, match=r"got an empty text; write \. for the current folder"):
            place("")
    for name, words in (
        ("RUN|SCAN", ["embed", ""]),
        ("--store", ["embed", "--store", ""]),
        ("--apply", ["segment", "a", "--apply="]),
        ("--axial-length", ["segment", "a", "--axial-length", ""]),
        ("--out", ["segment", "a", "--out", ""]),
    ):
        code, _, err = octfm_here(*words, cwd=tmp_path)
        assert code == 2 and f"'{name}': expected a path, got an empty text; a variable of the shell may" in err
    with pytest.raises(ConfigError, match=r"data\.store: .*got an empty text"):
        load(PretrainConfig, {"data": {"store": ""}})


def test_every_option_that_may_be_a_path_says_so():
    """A plain Path or text would make a folder called s3: of an address."""
    places = {
        "out",
        "store",
        "catalog",
        "run",
        "runs",
        "entries",
        "files",
        "file",
        "root",
        "labels",
        "embeddings",
        "table",
        "participants",
    }
    for verb, option in OPTIONS:
        if option.name in places and (verb, option.name) not in {("phantom", "participants")}:
            parsers = (local_path, options.place, addresses.expect_place)
            assert inspect.unwrap(parser_of(verb, option)) in parsers, (verb, option.name)


@given(secretive())
@settings(max_examples=200)
@example(("s3://AKIA:kE7yx@b", "kE7yx"))
def test_messages_of_libraries_are_masked(given_one):
    address, secret = given_one
    blind = any(char in address for char in " \"'")  # a word ends there
    assert blind or secret not in addresses.mask(f"Could not connect to {address}: timed out; s3://bucket/a@b is fine")
    assert "s3://bucket/a@b is fine" in addresses.mask(f"{address} and s3://bucket/a@b is fine")


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/a@b.dcm",
        "gs://my.bucket_1/x",
        "/data/user@host/x",
        "runs/a",
        "x.zip!/a://b",
        "scan:1.dcm",
        "C:\\a@b",
        "a b/c",
    ],
)
def test_what_is_no_secret_is_left_alone(text):
    assert addresses.expect_place(text) == text == addresses.mask(text)
    assert isinstance(location(text), BucketPath) == ("://" in text and "!/" not in text)


def test_a_long_word_without_an_address_is_judged_at_once():
    """A search in the square of its length would take hours."""
    assert not addresses.holds_credentials("x" * 1_000_000)


def test_a_table_of_files_does_not_quote_a_key(tmp_path):
    from octfm.catalog.scan import scan

    (tmp_path / "scans").mkdir()
    (tmp_path / "scans" / "a.dcm").write_bytes(b"x")
    (tmp_path / "files.csv").write_text("participant,filepath\n1,s3://AKIA:wJalr@bucket/a.dcm\n")
    with pytest.raises(TableError, match="line 2") as caught:
        scan(tmp_path / "scans", table=tmp_path / "files.csv")
    assert "wJalr" not in str(caught.value) and isinstance(caught.value, OctfmError)
