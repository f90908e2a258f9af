"""No traceback, ever: odd values for every option of every verb and for every setting end in one line, and leave
nothing behind."""

import importlib.util
import re
import socket
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octfm.config import load
from octfm.errors import ConfigError, one_line
from support.command_line import octfm_here
from support.odd_values import (
    BASES,
    SETTINGS,
    complaint,
    files_in,
    leaves,
    lines,
    make_world,
    odd_values,
    parameters,
    verbs,
)

ODD_YAML = (
    "-1e30", "1e30", "1e400", "-1", ".nan", ".inf", "-.inf", "9" * 5000, "010", "1:30", "2024-01-01", "", " ", "None", "null", "[]", "{}",
    "[1e-9, 1e-9, 1e-9]", "[100000, 100000, 100000]", "[-1, -1, -1]", "[.nan, .nan, .nan]", "[[[[]]]]", "&a [*a]", "!!python/name:os.system x",
    "'a\\nb'", '"a\\0b\\x1b[2J"', "\x1b[2J", "\udcff", "x" * 5000, "=", "a=b", "true",
)  # fmt: skip


@pytest.fixture(scope="module")
def world(light_checks, tmp_path_factory):
    return make_world(tmp_path_factory.mktemp("world"))


def test_every_verb_has_a_command_line_to_make_odd():
    assert set(BASES) == set(verbs()), "a new verb needs a line in odd_values.BASES"


@pytest.mark.parametrize("verb", sorted(BASES))
def test_every_number_has_two_ends(verb, tmp_path):
    """Else a huge, negative or endless one reaches the code behind the command line."""
    for parameter in parameters(verb):
        if parameter.kind in (int, float):
            for odd in ("-" + "9" * 30, "9" * 30, "nan", "inf", "1e400"):
                words = [word.replace("{", "").replace("}", "") for word in lines(parameter, odd)]
                code, _, err = octfm_here(verb, *words, cwd=tmp_path)
                assert code == 2 and parameter.option in err and complaint(code, "", err) is None, (words, err)
    assert files_in(tmp_path) == set()


@pytest.mark.parametrize("most", [1, pytest.param(None, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_odd_values_of_every_option_end_in_one_line(most, world, tmp_path):
    """Exit code 0, 1, 2 or 75, one line, nothing of it a command to the terminal; and what is refused leaves no file
    in --out."""
    faults = []
    for verb in BASES:
        for parameter in parameters(verb):
            for number, odd in enumerate(odd_values(parameter, most)):
                out = tmp_path / f"{verb}-{parameter.name}-{number}"
                words = [word.format(**world, out=out) for word in lines(parameter, odd)]
                code, said, err = octfm_here(verb, *words, cwd=tmp_path)
                if fault := complaint(code, said, err) or (code in (1, 2) and "leaves files" * bool(files_in(out))):
                    faults.append((verb, parameter.name, odd[:40], fault, err[-200:]))
    assert not faults, "\n".join(map(str, faults))


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0/{}"), max_size=30)
NAME = st.binary(max_size=8).map(lambda name: name.translate(None, b"\0/{}").decode("utf-8", "surrogateescape"))
NUMBER = st.one_of(st.integers(), st.floats(), st.integers(-(10**40), 10**40)).map(str)
ANYTHING = st.one_of(TEXT, NAME, NUMBER).filter(lambda word: word.strip() not in (".", "..", ""))
EVERY = [parameter for verb in BASES for parameter in parameters(verb)]


def _line(parameter, odd, world, out):
    """A command line that writes into `out` only."""
    odd = f"{world['below']}/{odd}" if parameter.writes else odd
    return [parameter.verb, *(word.format(**world, out=out) for word in lines(parameter, odd))]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@settings(max_examples=400)
@given(parameter=st.sampled_from(EVERY), odd=ANYTHING, number=st.integers(0, 10**9))
def test_anything_for_any_option_ends_in_one_line(parameter, odd, number, world, tmp_path):
    words = _line(parameter, odd, world, tmp_path / str(number))
    code, said, err = octfm_here(*words, cwd=tmp_path)
    assert complaint(code, said, err) is None, (words, code, said, err)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("verb", sorted(BASES))
def test_processes_end_as_the_function_does(verb, world, tmp_path):
    """Nothing is said at the end of an interpreter either, by threads, children or torch."""
    for parameter in parameters(verb)[::3]:
        words = _line(parameter, odd_values(parameter, 1)[0], world, tmp_path / parameter.name)
        command = [sys.executable, "-c", "from octfm.cli.main import main; main()", *words]
        done = subprocess.run(command, capture_output=True, cwd=tmp_path, timeout=300)
        said, err = done.stdout.decode(), done.stderr.decode()
        assert complaint(done.returncode, said, err) is None, (words, done.returncode, said, err)


@pytest.mark.slow
def test_every_verb_works_on_its_own_line(world, tmp_path):
    """Else the test above would see the same refusal again and again."""
    for verb in BASES:
        code, said, err = octfm_here(
            verb, *(word.format(**world, out=tmp_path / verb) for word in BASES[verb]), cwd=tmp_path
        )
        assert code == 0 or (verb == "demo" and "no image files" in err), (verb, said, err)


@pytest.mark.parametrize("model", dict.fromkeys(SETTINGS.values()), ids=lambda model: model.__name__)
def test_odd_settings_are_refused_in_one_line(model):
    base = {"encoder": "x"} if "encoder" in model.model_fields else {}
    for key, kind in leaves(model):
        for odd in ODD_YAML:
            try:
                config = load(model, base, [f"{key}={odd}"])
            except ConfigError as error:
                assert len(one_line(error)) < 2000
                continue
            value = config
            for name in key.split("."):
                value = getattr(value, name)
            assert not _is_number(value) or abs(value) <= 1e13, (
                f"{key}={odd[:20]} is accepted: it needs a bound ({kind})"
            )


def _is_number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@pytest.mark.skipif(
    importlib.util.find_spec("wandb") is None, reason="wandb is not installed: pip install octfm[wandb]"
)
def test_wandb_without_a_key_or_a_server_stops_before_step_0(world, tmp_path, monkeypatch):
    """W&B would ask for one at a terminal that nobody watches, or wait for minutes."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ["pretrain", *(word.format(**world, out="run") for word in BASES["pretrain"]), "tracking.wandb=online"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        code, said, err = octfm_here(*words, cwd=tmp_path)
    assert (
        code == 1 and "tracker: Weights & Biases answers, but no key is set" in err and not complaint(code, said, err)
    )
    code, said, err = octfm_here(*words, cwd=tmp_path)
    assert code == 1 and "tracker: Weights & Biases cannot be reached (127.0.0.1" in err
    assert complaint(code, said, err) is None and files_in(tmp_path) == set()


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in zip("abcdefghi", "bcdefghij", strict=True)
)
STRANGERS = {
    "a rate of 1e9": (
        "pretrain",
        "schedule.base_lr=1e9",
        r"schedule\.base_lr': expected at most 1\.0, got 1000000000",
    ),
    "a spacing of nothing": (
        "prepare",
        "target_spacing=[1e-9, 1e-9, 1e-9]",
        r"target_spacing\.0: .* 0\.0001, got 1e-09",
    ),
    "a volume of a petabyte": (
        "prepare",
        "image_size=[100000, 100000, 100000]",
        r"would take 1,000,000\.00 GB for each volume",
    ),
    "folds beyond counting": ("probe", "--folds=100000", r"'--folds': Input should be less than or equal to 1000"),
    "more folds than people": ("probe", "--folds=900", r"fold"),
    "negative workers": ("scan", "--workers=-1", r"'--workers': Input should be greater than or equal to 0"),
    "an age that is none": ("trust", "--age-bands=nan,nan", r"--age-bands: expected years in ascending order"),
    "a date for a number": ("finetune", "epochs=2024-01-01", r"epochs': expected a number, got '2024-01-01'"),
    "a scan of a terabyte": ("phantom", "--size=10000x10000x10000", r"take 1,000\.0 GB; at most 0\.5 GB"),
    "no distance": ("view", "--spacing=0,0,0", r"--spacing: expected dz,dy,dx in millimetres"),
    "a config that contains itself": ("pretrain", "{recursive}", r"line 1: a value that contains itself"),
    "a billion laughs": ("doctor", "{laughs}", r"expands to more than 100,000 values"),
    "a mask that the truth lacks": ("segment", "mask_values=[1]", r"expected an array lesions, found surfaces"),
    "a network without neurons": (
        "doctor",
        "model.mlp_ratio=1e-12",
        r"model\.mlp_ratio': expected at least 0\.125, got 1e-12",
    ),
    "a line break in a name": ("bench", "a\nb\x1b[2J", r"a\\nb\\x1b\[2J: no such config file"),
}


@pytest.mark.parametrize("case", STRANGERS)
def test_what_strangers_tried_is_one_line(case, world, tmp_path):
    verb, word, message = STRANGERS[case]
    (tmp_path / "recursive.yaml").write_text("a: &a [*a]")
    (tmp_path / "laughs.yaml").write_text(LAUGHS)
    word = word.format(**world, recursive=tmp_path / "recursive.yaml", laughs=tmp_path / "laughs.yaml")
    base = [part.format(**world, out=tmp_path / "out") for part in BASES[verb]]
    words = [verb, *base, word] if "=" in word else [verb, word, *base[1:]]
    code, said, err = octfm_here(*words, cwd=tmp_path)
    assert code in (1, 2) and complaint(code, said, err) is None and re.search(message, err), (code, said, err)
    assert not (tmp_path / "out").exists()
