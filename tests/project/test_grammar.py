"""One grammar for all verbs: version, completion, examples that parse, words for types, the same options everywhere."""

import os
import re
import shlex
import subprocess
import sys

import pytest

import octfm
from octfm.cli.options import pretraining_words, with_options
from octfm.config import ConfigError, known_keys
from octfm.pretraining.settings import load_config
from support.command_line import octfm_here
from support.odd_values import SETTINGS, verbs

VERBS = verbs()


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_every_verb_ends_with_examples_that_parse(verb, tmp_path):
    code, text, err = octfm_here(verb, "--help", cwd=tmp_path)
    assert (code, err) == (0, "")
    examples = [line.strip() for line in re.split(r"^Examples?:\n", text, flags=re.M)[1].splitlines()]
    assert examples
    for example in examples:
        program, name, *words = shlex.split(example)
        assert (program, name) == ("octfm", verb)
        parsed = VERBS[verb].make_context(verb, words).params
        settings = [word for value in parsed.values() if isinstance(value, list) for word in map(str, value)]
        for key in [word.partition("=")[0] for word in settings if re.match(r"[a-z_.]+=", word)]:
            assert key in known_keys(SETTINGS[verb]), f"{example}: no setting {key}"


@pytest.mark.parametrize("verb", VERBS)
def test_help_names_what_to_type_not_types_of_python(verb, tmp_path):
    text = octfm_here(verb, "--help", cwd=tmp_path)[1]
    assert not re.search(r"<=x<=|<\w+(\[|>| range)|\b(PATH|PLACE|INTEGER|FLOAT|LIST)\b", text)
    for parameter in VERBS[verb].params:
        assert parameter.metavar or parameter.name == "help" or getattr(parameter, "is_flag", False), parameter.name


def test_the_list_of_verbs_cuts_no_sentence_off(tmp_path):
    text = octfm_here("--help", cwd=tmp_path)[1]
    assert "..." not in text.partition("Commands:")[2] and "then pretraining, probe and report" in " ".join(
        text.split()
    )


def test_a_store_is_named_by_one_option_everywhere():
    named = {verb for verb in VERBS for parameter in VERBS[verb].params if "--store" in parameter.opts}
    assert named == {
        *("doctor", "pretrain", "bench", "embed", "finetune", "leaderboard", "trust", "segment", "report", "card")
    }
    assert all(p.metavar == "STORE" for verb in named for p in VERBS[verb].params if "--store" in p.opts)


def test_options_replace_the_length_in_a_config():
    assert load_config("demo").steps == 800 and load_config("demo", pretraining_words([], None, None, 2.0)).epochs == 2
    (epochs,) = [word for word in pretraining_words(["model.depth=6"], "a b", 7, None) if word.startswith("epochs")]
    config = load_config("demo", [epochs, *pretraining_words(["model.depth=6"], "a b", 7, None)])
    assert (config.steps, config.epochs, config.data.store, config.model.depth) == (7, None, "a b", 6)


def test_a_setting_given_both_ways_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--store and store= are the same setting"):
        with_options(["store=a"], {"store": "b"})
    code, _, err = octfm_here("pretrain", "vit_s", "--steps=3", "--epochs=2", cwd=tmp_path)
    assert code == 1 and "steps and epochs both say" in err and err.count("\n") == 1
    both = ["steps=100000", "epochs=2"]
    for words, steps, epochs in ((both, None, None), (both[1:], 100000, None), (both[:1], None, 2.0)):
        with pytest.raises(ConfigError, match="steps and epochs both say"):
            pretraining_words(words, None, steps, epochs)
    for null in ("null", "~", " NULL"):
        words = pretraining_words(["steps=100000", f"epochs={null}"], None, None, None)
        assert load_config("vit_s", words).epochs is None
    code, _, err = octfm_here("segment", "scan.dcm", "--steps=3", cwd=tmp_path)
    assert code == 1 and "--store and --steps: settings of a training" in err and err.count("\n") == 1


@pytest.mark.parametrize("words", [["doctor", "vit_s"], ["finetune", "study_group_linear", "encoder=x"]])
def test_the_store_option_reaches_the_verb(words, tmp_path):
    code, _, err = octfm_here(*words, "--store=nowhere", cwd=tmp_path)
    assert code == 1 and "nowhere" in err, err


def test_version_is_one_line(tmp_path):
    assert octfm_here("--version", cwd=tmp_path) == (0, f"octfm {octfm.__version__}\n", "")


@pytest.mark.slow
def test_bash_completes_verbs_options_and_configs(tmp_path):
    """With the script that --install-completion installs, in a real bash."""
    program = tmp_path / "octfm"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m octfm "$@"\n')
    program.chmod(0o755)
    script = 'eval "$(_OCTFM_COMPLETE=source_bash octfm)"\n'
    for words in ("octfm pret", "octfm doctor --ep", "octfm pretrain vit"):
        script += f"COMP_WORDS=({words}); COMP_CWORD={len(words.split()) - 1}; _octfm_completion octfm; echo ${{COMPREPLY[@]}}\n"
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.stdout.splitlines() == ["pretrain", "--epochs", "vit_s"], done.stderr
