"""Config files: overrides win, every key is known, every error names where and what to do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octfm.config import dump, find_config, load
from octfm.errors import ConfigError
from octfm.evaluation.finetune_settings import FinetuneConfig
from octfm.training.settings import PretrainConfig, load_config


@pytest.fixture
def yaml_file(tmp_path):
    def write(text):
        path = tmp_path / "c.yaml"
        path.write_text(text)
        return path

    return write


def test_override_wins(yaml_file):
    config = load_config(
        yaml_file("steps: 7\nmodel: {width: 192, heads: 3}"), ("model.depth=6", "steps=9", "masks.budget=null")
    )
    assert (config.model.width, config.model.depth, config.steps, config.masks.budget) == (192, 6, 9, None)


def test_scientific_notation_is_a_number(yaml_file):
    assert load_config(yaml_file("schedule: {base_lr: 1e-4}")).schedule.base_lr == 1e-4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {widht: 192}", r"c\.yaml: unknown key model\.widht; did you mean model\.width\?"),
        ("model: {width: wide}", r"c\.yaml: model\.width: .*integer.*got 'wide'"),
        ("steps: 0", r"steps: .*greater than or equal to 1.*got 0"),
        ("model: {heads: 5}", r"model: width 384 must split into 5 heads of even size"),
        ("masks: {mask_ratio: 0.9}", r"mask_ratio 0\.9 \+ context_ratio 0\.35 exceeds 1.*lower context_ratio to 0\.10"),
        (
            "objective: {goal_average: [2, 3, 4]}",
            r"objective\.goal_average \[2, 3, 4\] must divide model\.patch_size \[4, 16, 16\]",
        ),
        (
            "objective: {name: mae, goal_average: [4, 16, 16]}",
            r"goal_average \[4, 16, 16\] leaves one number of a patch.*halve it",
        ),
        (
            "objective: {name: data2vec, goal_average: [2, 1, 4]}",
            r"goal_average belongs to objective\.name vjepa2 or mae, not data2vec",
        ),
        (
            "objective: {name: mae, voxel_loss: 1}",
            r"objective\.voxel_loss belongs to objective\.name vjepa2, not mae; set it to 0",
        ),
        ("objective: {name: mae, target_levels: 2}", r"objective\.target_levels belongs to objective\.name vjepa2"),
        (
            "objective: {name: data2vec, target_norm: whiten}",
            r"whiten belongs to objective\.name vjepa2; data2vec compares directions",
        ),
        ("- a list", "expected a mapping of settings, got list"),
        ("a: [", "not valid YAML"),
    ],
)
def test_wrong_config_is_one_clear_error(yaml_file, text, message):
    with pytest.raises(ConfigError, match=message) as error:
        load_config(yaml_file(text))
    assert "\n" not in str(error.value)


def test_missing_config_names_the_packaged_ones():
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such config file.*demo.*vit_s"):
        load_config("nowhere.yaml")


@pytest.mark.parametrize("override", ["model.depth", "=3", "steps.depth=3", "steps=[", "steps={a: }}"])
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
