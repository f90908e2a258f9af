"""Write empty CUDA libraries so that a CUDA build of torch imports on a machine without CUDA. Usage: empty_cuda.py
VENV"""

import collections
import re
import subprocess
import sys
import tempfile
from pathlib import Path

LIBRARIES = [
    "libcublas.so.12",
    "libcublasLt.so.12",
    "libcudnn.so.9",
    "libcufft.so.11",
    "libcurand.so.10",
    "libcusolver.so.11",
    "libcusparse.so.12",
    "libcusparseLt.so.0",
    "libnccl.so.2",
    "libcufile.so.0",
    "libnvrtc.so.12",
    "libnvJitLink.so.12",
]
CUDA_NAME = re.compile(r"^(cublas|cudnn|cufft|curand|cusolver|cusparse|nccl|cuFile|nvrtc|nvJitLink|nvshmem|__cu)")


def symbols(site: Path) -> tuple[set[str], dict[str, set[str]]]:
    """Names defined anywhere, and names torch leaves undefined, by the library version they ask for."""
    defined, undefined = set(), collections.defaultdict(set)
    torch_libraries = list(site.glob("torch/lib/*.so*"))
    for library in torch_libraries + list(site.glob("nvidia/*/lib/*.so*")):
        listing = subprocess.run(["nm", "-D", str(library)], capture_output=True, text=True).stdout
        for fields in map(str.split, listing.splitlines()):
            if len(fields) == 3:
                defined.add(fields[2].split("@")[0])
            elif len(fields) == 2 and fields[0] == "U" and library in torch_libraries:
                name, _, version = fields[1].partition("@")
                undefined[version.lstrip("@")].add(name)
    return defined, undefined


def write_library(out: Path, soname: str, names: set[str], version: str | None) -> None:
    with tempfile.TemporaryDirectory() as work:
        source, script = Path(work, "s.c"), Path(work, "s.map")
        source.write_text("\n".join(f"int {n}(void){{return 999;}}" for n in sorted(names)) or "int empty_stub;")
        command = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{soname}", "-o", str(out / soname)]
        if version:
            script.write_text(f"{version} {{ global: *; }};")
            command.append(f"-Wl,--version-script={script}")
        subprocess.check_call([*command, str(source)])


def main(venv: Path) -> None:
    site = next(venv.glob("lib/python3.*/site-packages"))
    defined, undefined = symbols(site)
    unversioned = {n for n in undefined[""] if CUDA_NAME.match(n) and n not in defined}
    for soname in LIBRARIES:
        versioned = soname in undefined and soname != "libnccl.so.2"
        names = undefined.get(soname, set())
        # Unversioned names may live in any loaded library: they all go to NCCL's stub.
        names = names | unversioned if soname == "libnccl.so.2" else names
        write_library(site / "torch" / "lib", soname, names, soname if versioned else None)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
