"""Config files: overrides win, every key is known, every error names where and what to do."""

import ast
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octfm.config import dump, find_config, load
from octfm.errors import ConfigError
from octfm.pretraining.settings import PretrainConfig, load_config
from octfm.tasks.finetune_settings import FinetuneConfig
from octfm.volume.preprocessing import Preprocessing
from support import ROOT
from support.examples import examples


@pytest.fixture
def yaml_file(tmp_path):
    def write(text):
        path = tmp_path / "c.yaml"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("name", ["study #2/prep", "#2/prep", "two\nlines/prep", "o'neill/prep", "prep\u3000"])
def test_a_path_in_an_override_is_taken_as_it_was_typed(name):
    """As YAML, the first one was the folder `study`, and a run may have trained on another store than the one named."""
    assert load_config("vit_s", [f"data.store={name}"]).data.store == name
    assert load_config("vit_s", ["data.store='quoted'"]).data.store == "quoted"


def test_override_wins(yaml_file):
    config = load_config(
        yaml_file("steps: 7\nmodel: {width: 192, heads: 3}"), ("model.depth=6", "steps=9", "masks.budget=null")
    )
    assert (config.model.width, config.model.depth, config.steps, config.masks.budget) == (192, 6, 9, None)


@pytest.mark.parametrize(
    ("meant", "typed"),
    [
        ("model.depth", "modle.depth=6"),
        ("model.depth", "modl.dpth=6"),
        ("model.depth", "depth=6"),
        ("data.store", "store=x"),
        ("data.global_batch_size", "batch_size=8"),
        ("schedule.base_lr", "lr=1e-4"),
        ("epochs", "epoch=3"),
    ],
)
def test_a_misspelt_key_finds_the_one_that_was_meant(meant, typed):
    with pytest.raises(ConfigError) as caught:
        load_config("vit_s", [typed])
    assert str(caught.value).endswith(f"unknown key {typed.partition('=')[0]}; did you mean {meant}?")


def test_an_unlike_key_is_answered_with_its_section_alone():
    with pytest.raises(ConfigError) as caught:
        load_config("vit_s", ["schedule.zzzzzz=6"])
    assert "known keys: schedule.base_lr, " in str(caught.value) and "model" not in str(caught.value)


def test_scientific_notation_is_a_number(yaml_file):
    assert load_config(yaml_file("schedule: {base_lr: 1e-4}")).schedule.base_lr == 1e-4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {widht: 192}", r"c\.yaml: unknown key model\.widht; did you mean model\.width\?"),
        ("model: {width: wide}", r"c\.yaml: model\.width: expected a whole number, got 'wide'"),
        ("steps: 0", r"steps: expected at least 1, got 0"),
        ("model: {heads: 5}", r"model: width 384 must split into 5 heads of even size"),
        ("predictor: {heads: 5}", r"predictor: width 192 must split into 5 heads of even size"),
        ("predictor: {width: 8, heads: 2}", r"predictor: rotary positions need heads of width 6 or more, .* got 4"),
        ("masks: {mask_ratio: 0.9}", r"mask_ratio 0\.9 \+ context_ratio 0\.35 exceeds 1.*lower context_ratio to 0\.10"),
        (
            "objective: {goal_average: [2, 3, 4]}",
            r"objective\.goal_average \[2, 3, 4\] must divide model\.patch_size \[4, 16, 16\]",
        ),
        (
            "objective: {name: mae, goal_average: [4, 16, 16]}",
            r"goal_average \[4, 16, 16\] leaves one number per patch.*halve it",
        ),
        (
            "objective: {name: data2vec, goal_average: [2, 1, 4]}",
            r"goal_average belongs to objective\.name vjepa2 or mae or anchored, not data2vec",
        ),
        (
            "objective: {name: mae, voxel_loss: 1}",
            r"objective\.voxel_loss belongs to objective\.name vjepa2, not mae; set it to 0",
        ),
        ("objective: {name: mae, target_levels: 2}", r"objective\.target_levels belongs to objective\.name vjepa2"),
        (
            "objective: {name: data2vec, target_norm: whiten}",
            r"objective\.target_norm belongs to objective\.name vjepa2, not data2vec; set it to layer",
        ),
        ("# all of it is a comment", "holds no settings; write some and save it again"),
        ("- a list", "expected a mapping of settings, got list"),
        ("a: [", "not valid YAML"),
        (
            "steps: 3\nseed: 1\nsteps: 4",
            r"c\.yaml: .*line 3: steps is set twice \(first in line 1\); keep one",
        ),
        ("model:\n  depth: 2\n  width: 48\n  depth: 3", r"line 4: depth is set twice \(first in line 2\)"),
        ("seed: 010", r"line 1: 010: a number with a leading zero"),
        ("seed: 1:30", r"seed: expected a whole number, got '1:30'"),
        ("seed: 2024-01-01", r"seed: expected a whole number, got '2024-01-01'"),
        ("seed: !!timestamp 2024-01-01", r"line 1: the tag .*timestamp; write the value alone"),
        ("on: 3", r"line 1: expected the name of a setting before the colon, got 'on'; quote it if it is text"),
        ("model: &m {x: *m}", r"line 1: a value that contains itself"),
        ("a: &a {<<: *a}", r"line 1: a value that contains itself"),
        ("[" * 5000, "nested hundreds deep"),
        (f"seed: {'9' * 5000}", "a number of 5,000 digits"),
        ("seed: 1e400", r"seed: .*finite.*got inf"),
        ("schedule: {base_lr: .nan}", r"schedule\.base_lr: .*finite.*got nan"),
        ("schedule: {base_lr: 1e9}", r"schedule\.base_lr: expected at most 1.0, got 1000000000"),
        ("data: {store: None}", r"data: store is the text 'None'; write null for no value"),
        ("schedule: {base_lr: true}", r"schedule: base_lr: expected a number, got true"),
        ("data: {max_samples: false}", r"data: max_samples: expected a number, got false"),
        ('data: {store: "null"}', r"data: store is the text 'null'"),
        ('data: {store: "a\\0b"}', r"contains a null or surrogate character"),
    ],
)
def test_wrong_config_is_one_clear_error(yaml_file, text, message):
    with pytest.raises(ConfigError, match=message) as error:
        load_config(yaml_file(text))
    assert "\n" not in str(error.value)


def test_missing_config_names_the_packaged_ones():
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such config file.*demo.*vit_s"):
        load_config("nowhere.yaml")


@pytest.mark.parametrize("merged", [False, True], ids=["lists", "merged"])
def test_aliases_that_multiply_are_refused_before_they_do(yaml_file, merged):
    """A billion laughs: a kilobyte that would fill the memory."""
    lines = ["a0: &a0 {x: 1}" if merged else "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    for level in range(1, 12):
        ten = ", ".join([f"*a{level - 1}"] * 10)
        lines.append(f"a{level}: &a{level} {{<<: [{ten}]}}" if merged else f"a{level}: &a{level} [{ten}]")
    with pytest.raises(ConfigError, match=r"line \d+: expands to more than 100,000 values"):
        load_config(yaml_file("\n".join(lines)))


def test_a_file_that_is_no_config_is_not_read(tmp_path):
    (tmp_path / "c.yaml").write_bytes(b"#" * 2_000_000)
    with pytest.raises(ConfigError, match=r"c\.yaml: expected a YAML file of settings.*got 2,000,000"):
        load_config(tmp_path / "c.yaml")


@settings(max_examples=examples(60))
@given(text=st.text(st.sampled_from("ab:-[]{},&*!|>?'\"#%@` \n\t0189.e+<~=\\\0\x85\ud800"), max_size=40))
def test_any_text_is_a_config_or_one_error(text, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    for source, overrides in ((path, []), ("vit_s", [text]), ("vit_s", [f"model.depth={text}"])):
        with suppress(ConfigError):
            load_config(source, overrides)


ODD_OVERRIDES = (
    *(
        "model.depth",
        "=3",
        "steps.depth=3",
        "steps=[",
        "steps={a: }}",
        "a..b=1",
        ".=1",
        "=",
        "",
        "model.depth=",
        "model. depth=1",
    ),
    *("steps=*a", "steps=&a [*a]", "steps=!!x 3", "data.store=\udcff", f"seed={'[' * 3000}", f"steps={'9' * 5000}"),
)


@pytest.mark.parametrize("override", ODD_OVERRIDES, ids=lambda text: ascii(text[:20]))
def test_malformed_override_is_refused(override):
    with pytest.raises(ConfigError, match="override") as error:
        load(PretrainConfig, {"steps": 3}, [override])
    assert "\n" not in str(error.value)


def test_config_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"c\.yaml: expected a YAML text file in UTF-8"):
        load_config(tmp_path / "c.yaml")


@pytest.mark.parametrize("name", sorted(p.stem for p in find_config("vit_s").parent.glob("*.yaml")))
def test_packaged_configs_load_and_round_trip(name, tmp_path):
    kind = FinetuneConfig if name.startswith("study_group_") else PretrainConfig
    config = load(kind, name)
    (tmp_path / "again.yaml").write_text(dump(config))
    assert load(kind, tmp_path / "again.yaml") == config


@given(key=st.text(st.characters(codec="ascii", categories=["L"]), min_size=1, max_size=12))
def test_no_unknown_key_is_ever_ignored(key):
    if key not in PretrainConfig.model_fields:
        with pytest.raises(ConfigError, match="unknown key"):
            load(PretrainConfig, {key: 1})


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("model.depth=1.5", "override 'model.depth': expected a whole number, got 1.5"),
        (
            "model.patch_size=[1,2]",
            "override 'model.patch_size': model.patch_size.2: expected a longer list, got [1, 2]",
        ),
        ("data.scanners=x", "override 'data.scanners': expected a list such as [1, 2], got 'x'"),
        ("data.balance_scanners=maybe", "override 'data.balance_scanners': expected true or false, got 'maybe'"),
        ("precision=half", "override 'precision': expected 'fp32' or 'bf16', got 'half'"),
        ("model=3", "override 'model': expected a section of settings, written SECTION.KEY=VALUE, got 3"),
    ],
)
def test_a_wrong_value_is_said_in_plain_words_and_laid_to_its_override(word, message):
    with pytest.raises(ConfigError) as error:
        load_config("vit_s", [word])
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ckpt_second_dir=None"], "override 'ckpt_second_dir': ckpt_second_dir is the text 'None'"),
        (["model={width: 48}", "model.depth=x"], "override 'model.depth': expected a whole number, got 'x'"),
        (
            ["modle.depth=4", "modle.width=48"],
            "override 'modle.depth': unknown key modle.depth; did you mean model.depth?",
        ),
        (["modle={foo: 1, bar: 2}"], "override 'modle': unknown key modle; did you mean model?"),
        (["data.prefetch=1", "data.store=None"], "override 'data.store': data: store is the text 'None'"),
        (["model.depth=4", "model.heads=5"], "override 'model.heads': model: width 384 must split into 5 heads"),
        (
            ["objective.goal_average=[2,3,4]"],
            "override 'objective.goal_average': objective.goal_average [2, 3, 4] must",
        ),
    ],
)
def test_a_problem_is_laid_to_the_override_that_it_names(words, message):
    """Not to the packaged file, where nobody finds it, nor to another setting of that section."""
    with pytest.raises(ConfigError) as error:
        load_config("vit_s", words)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"masks": {"mask_ratio": 0.9}}, "masks.plane=enface"),
        ({"objective": {"name": "mae", "voxel_loss": 1}}, "objective.pool=mean"),
        ({"model": {"depth": 2}, "objective": {"target_levels": 4}}, "predictor.depth=4"),
    ],
)
def test_a_problem_of_the_file_is_not_laid_to_an_override_that_it_does_not_name(given, word):
    with pytest.raises(ConfigError, match=r"^settings: ") as error:
        load(PretrainConfig, given, [word])
    assert word.partition("=")[0] not in str(error.value)


def test_settings_made_in_python_are_refused_in_one_line_too():
    """Pydantic answered, in four lines without the key that was meant."""
    with pytest.raises(ConfigError, match=r"^Preprocessing: unknown key imagesize; did you mean image_size\?$"):
        Preprocessing(**{"imagesize": 3})
    with pytest.raises(ConfigError, match=r"^PretrainConfig: model\.depth: expected a whole number, got 'deep'$"):
        PretrainConfig(**{"model": {"depth": "deep"}})


@pytest.mark.parametrize(
    ("written", "place"),
    [
        ("runs/a/", "runs/a"), ("./runs//a//", "./runs//a"), ("/", "/"), ("./", "."),
        ("s3://b/a/", "s3://b/a"), ("s3://b/", "s3://b"), ("s3://", "s3://"), ("x.zip!/a/", "x.zip!/a"),
    ],
)  # fmt: skip
def test_a_place_is_the_same_with_a_slash_at_its_end(written, place):
    """As a shell completes the name of a folder: octfm finetune refused to resume, since the encoder had changed."""
    assert FinetuneConfig(encoder=written).encoder == place


def test_an_unknown_key_is_laid_to_the_override_and_not_to_the_file():
    with pytest.raises(ConfigError, match=r"^override 'modle\.depth': unknown key modle\.depth; did you mean model\."):
        load_config("vit_s", ["steps=3", "modle.depth=2"])


def test_type_checkers_see_the_default_of_every_setting():
    """They know defaults by the keyword alone: a call such as Preprocessing() was an error in a user's editor."""
    texts = {path: path.read_text() for path in (ROOT / "src" / "octfm").rglob("*.py")}
    for path, text in texts.items():
        for node in ast.walk(ast.parse(text)) if "from pydantic import" in text else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Field":
                assert not node.args, f"{path}, line {node.lineno}: write Field(default=…)"
