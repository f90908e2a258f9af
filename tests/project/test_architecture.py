"""The house: folders in the order of the data, each importing only what stands before it, and no circle of imports."""

import ast
from functools import cache
from pathlib import Path

import octfm

SOURCE = Path(octfm.__file__).parent.parent
ORDER = (
    *(
        "errors",
        "addresses",
        "config",
        "version",
        "threads",
        "display",
        "io",
        "volume",
        "formats",
        "phantom",
        "catalog",
        "store",
        "models",
        "run",
        "weights",
        "layers",
    ),
    *("pretraining", "encoder", "evaluation", "tasks", "trust", "report", "demo", "cli", "__main__"),
)
"""Folders and modules of octfm; docs/architecture.md describes them. The root package is the public face and may
name any."""


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text("utf-8")) for path in sorted((SOURCE / "octfm").rglob("*.py"))}


@cache
def imports() -> dict[str, set[str]]:
    """Module -> modules of octfm that it imports, inside functions and for types only as well."""
    paths = {name_of(path): path for path in trees()}
    found: dict[str, set[str]] = {}
    for module, path in paths.items():
        named = set()
        for node in ast.walk(trees()[path]):
            if isinstance(node, ast.Import):
                named |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path}: relative import"
                inside = {f"{node.module}.{alias.name}" for alias in node.names}
                named |= (inside & paths.keys()) | ({node.module} if inside - paths.keys() else set())
        found[module] = (named & paths.keys()) - {module}
    return found


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def place(module: str) -> int:
    return ORDER.index(module.split(".")[1])


def test_every_folder_imports_only_what_stands_before_it():
    upwards = [
        f"{module} imports {other}"
        for module, others in imports().items()
        for other in others
        if module != "octfm" and (other == "octfm" or place(other) > place(module))
    ]
    assert not upwards, "\n".join(upwards)


def test_no_module_imports_itself_through_others():
    """A depth-first walk; a module that is met again while it is still open closes a circle."""
    state: dict[str, str] = {}
    circles: list[str] = []

    def visit(module: str, trail: tuple[str, ...]) -> None:
        state[module] = "open"
        for other in sorted(imports()[module]):
            if state.get(other) == "open":
                circles.append(" -> ".join((*trail[trail.index(other) :], other)))
            elif other not in state:
                visit(other, (*trail, other))
        state[module] = "done"

    for module in sorted(imports()):
        if module not in state:
            visit(module, (module,))
    assert not circles, "\n".join(circles)


def test_only_named_doors_open_what_stands_later():
    """An import by name escapes the order, so each is listed: what a file asks for, or the user's own object."""
    doors = {"octfm.store.store": "octfm.evaluation.dataset"}
    found = {}
    for module in imports():
        path = SOURCE / Path(*module.split(".")).with_suffix(".py")
        for node in ast.walk(trees()[path]) if path in trees() else ():
            named = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args
            if named and isinstance(node.args[0], ast.Constant) and node.args[0].value.startswith("octfm."):
                found[module] = node.args[0].value
    assert found == doors


def test_folders_hold_at_most_16_modules():
    for folder in {path.parent for path in (SOURCE / "octfm").rglob("*.py")}:
        modules = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(modules) <= 16, f"{folder.relative_to(SOURCE)} holds {len(modules)} modules"


def test_what_is_printed_cannot_command_the_terminal():
    """Names of files and facts of headers are a stranger's: `echo_line` and `say` escape their control characters."""
    for path, tree in trees().items():
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and ast.unparse(call.func) in ("print", "typer.echo", "typer.secho"):
                allowed = "one_line(" in ast.unparse(call) or "__version__" in ast.unparse(call)
                assert allowed or name_of(path) == "octfm.layers.training", f"{path}:{call.lineno}: {ast.unparse(call)}"


def test_text_is_utf8_whatever_the_locale():
    """A folder is written on one machine and read on another: text needs an encoding, or a `b` in its mode."""
    for path, tree in trees().items():
        for call in ast.walk(tree):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
                names = {word.arg for word in call.keywords}
                words = [word.value for word in call.args if isinstance(word, ast.Constant)]
                without = {
                    "read_text": not call.args,
                    "write_text": len(call.args) < 2,
                    "open": bool(words) and str(words[0]) in ("r", "w", "a", "x", "r+", "w+", "a+"),
                    "run": "text" in names,
                    "Popen": "text" in names,
                    "NamedTemporaryFile": "w" in words,
                }
                left_to_the_locale = without.get(call.func.attr, False) and "encoding" not in names
                assert not left_to_the_locale, f"{path}:{call.lineno}: {ast.unparse(call)}"
