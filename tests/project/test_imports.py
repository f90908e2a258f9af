"""What is imported when: the data side never needs torch, the training path stays light, nothing heavy loads early."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import octfm

ROOT = Path(octfm.__file__).parent
NO_TORCH = (
    "display",
    "errors",
    "addresses",
    "config",
    "version",
    "io",
    "volume",
    "formats",
    "phantom",
    "catalog",
    "store",
    "report",
)
TRAINING_PATH = [
    "octfm.pretraining.pretrain",
    "octfm.store.loader",
    "octfm.store.store",
    "octfm.volume.preprocessing",
    "octfm.pretraining.masks",
    "octfm.pretraining.bench",
    "octfm.encoder.encoder",
    "octfm.tasks.finetune",
]
LIGHT = {"torch", "numpy", "yaml", "pydantic", "tensorstore"}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)


def modules() -> list[Path]:
    return [p for p in ROOT.rglob("*.py") if p != ROOT / "__init__.py"]


def part(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


@cache
def imported(path: Path) -> set[str]:
    tree = ast.walk(ast.parse(path.read_text()))
    names = set()
    for node in tree:
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module} | (
                {f"{node.module}.{a.name}" for a in node.names} if node.module == "octfm" else set()
            )
        elif isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
    return names


@pytest.mark.parametrize("path", [p for p in modules() if part(p) in NO_TORCH], ids=lambda p: str(p.relative_to(ROOT)))
def test_data_and_report_do_not_need_torch(path):
    assert not any(name.split(".")[0] == "torch" for name in imported(path))


def test_no_page_loads_torch_through_another_module():
    modules = ", ".join(name_of(path) for path in sorted((ROOT / "report").rglob("[a-z]*.py")))
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_models_do_not_touch_files():
    for path in (ROOT / "models").rglob("*.py"):
        assert not imported(path) & {"pathlib", "os", "io", "json", "yaml"}, path


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_training_path_imports_only_the_light_libraries():
    """What a bare GPU image has; readers and reports may need more, but only when they are used."""
    code = (
        f"import sys, {', '.join(LIGHT)}\nallowed = {{m.split('.')[0] for m in sys.modules}}\n"
        f"import {', '.join(TRAINING_PATH)}\nprint(*{{m.split('.')[0] for m in sys.modules}} - allowed)"
    )
    extra = set(run_python(code).split()) - sys.stdlib_module_names - {"octfm", "annotated_types"}  # pydantic's own
    # Private modules belong to the Python build and to extensions of the libraries above.
    extra = {name for name in extra if not name.startswith("_")}
    assert not extra, f"the training path imports {sorted(extra)}; allowed: {sorted(LIGHT)}"


@pytest.mark.parametrize(
    "what",
    [
        "import octfm",
        "import sys; sys.argv = ['octfm', '--help']\nfrom octfm.cli.main import app\nimport octfm.cli.main",
    ],
)
def test_nothing_heavy_is_imported_early(what):
    heavy = {"torch", "numpy", "pydicom", "zarr", "matplotlib", "sklearn", "pyarrow", "pydantic", "tensorstore"}
    loaded = set(run_python(f"{what}\nimport sys\nprint(*{{m.split('.')[0] for m in sys.modules}})").split())
    assert not loaded & heavy


def test_packaged_networks_are_listed_without_torch():
    code = "import sys\nfrom octfm.weights.packaged import everything_packaged as all\nall()\nprint('torch' in sys.modules)"
    assert run_python(code).strip() == "False"


def test_every_public_name_has_a_home_and_is_public_to_type_checkers():
    """mypy --strict takes no name from a list that is put together."""
    body = ast.parse((ROOT / "__init__.py").read_text()).body
    (written,) = (n.value for n in body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "__all__")
    assert sorted(ast.literal_eval(written)) == sorted([*octfm._HOME, "__version__"])
    for name in octfm.__all__:
        assert getattr(octfm, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'train'"):
        _ = octfm.train


def test_scripts_of_docs_and_benchmarks_import_what_there_is():
    """No other test runs most of them."""
    scripts = [path for folder in ("docs", "benchmarks") for path in (ROOT.parents[1] / folder).rglob("*.py")]
    assert scripts
    for path in scripts:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "octfm":
                exec(ast.unparse(node), {})  # a name that is missing raises ImportError


def test_only_the_runtime_knows_devices_and_ranks():
    """Everything else trains as if it were alone on one device. A kernel is chosen by the tensors that it is given,
    and DCP is a format of files: neither names an accelerator nor talks to another process."""
    runtime = {ROOT / "run" / name for name in ("launch.py", "runtime.py", "runtime_xla.py")}
    runtime |= {ROOT / "pretraining" / "preflight" / name for name in ("tpu_record.py", "tpu_compile.py")}
    for path in set(modules()) - runtime:
        foreign = {name for name in imported(path) if name.split(".")[0] in ("torch_xla", "torch_tpu", "jax")}
        foreign |= {
            name for name in imported(path) if name.startswith("torch.distributed") and "checkpoint" not in name
        }
        assert not foreign, f"{path.relative_to(ROOT)} imports {sorted(foreign)}"
        text = path.read_text()
        named = [word for word in ("torch.cuda", "dist.all_", "dist.broadcast", "init_process_group") if word in text]
        assert not named, f"{path.relative_to(ROOT)} names {named}"
    loop = (ROOT / "pretraining" / "pretrain.py").read_text()
    branches = [word for word in ("steady", "sharded", "device.type", "xla", "fsdp", "parallel ==") if word in loop]
    assert not branches, f"the loop names {branches}"
