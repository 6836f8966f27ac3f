"""Builds weakref_ext._C; the WEAKREF_EXT_* variables that it reads are in the README's table."""

import os
import platform
import re
import subprocess
from pathlib import Path

from setuptools import setup

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension
except ImportError:  # an sdist needs no torch
    torch = None

ROOT = Path(__file__).parent


def on(name):
    return os.environ.get(name, "0") not in ("", "0")


def cuda_include():
    """The folder of cuda_runtime_api.h: of the toolkit, or of the pip packages that CUDA builds of torch depend on."""
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    try:  # nvcc on PATH may be a wrapper script in another folder: ask it where it lives
        dryrun = subprocess.run(["nvcc", "--dryrun", "x.cu"], capture_output=True, text=True).stderr
        roots += re.findall(r"^#\$ TOP=(.*)$", dryrun, re.MULTILINE)
    except OSError:
        pass
    roots += ["/usr/local/cuda", *Path(torch.__file__).parents[1].glob("nvidia/cu*")]
    for root in filter(None, roots):
        if (Path(root) / "include" / "cuda_runtime_api.h").exists():
            return str((Path(root) / "include").resolve())
    return None


def cuda_flags():
    """Include folder, library and macro of a CUDA build; nothing for a CPU build."""
    wanted = os.environ.get("WEAKREF_EXT_CUDA")
    if wanted == "0":
        return {}
    include = cuda_include() if torch.version.cuda else None
    if include:
        return dict(include_dirs=[include], libraries=["c10_cuda"], define_macros=[("WEAKREF_EXT_CUDA", None)])
    if wanted == "1" or torch.version.cuda:
        missing = "the headers of a CUDA toolkit (set CUDA_HOME)" if torch.version.cuda else "a CUDA build of torch"
        raise SystemExit(f"weakref_ext: a CUDA build needs {missing}; WEAKREF_EXT_CUDA=0 builds without")
    return {}


def extension():
    cuda = cuda_flags()
    kinds = {"core", "python", "cuda"} if cuda else {"core", "python"}
    lines = [line.split() for line in (ROOT / "csrc/sources.txt").read_text().splitlines()]
    # -isystem: warnings of torch's headers are not ours
    flags = ["-fvisibility=hidden", "-Wall", "-Wextra"]
    flags += [f"-isystem{folder}" for folder in torch.utils.cpp_extension.include_paths()]
    flags += ["-g", "-O0"] if on("WEAKREF_EXT_DEBUG") else ["-g0", "-O3"]
    flags += ["-Werror"] if on("WEAKREF_EXT_WERROR") else []
    sanitize = ["-fsanitize=address,undefined"] if on("WEAKREF_EXT_SANITIZE") else []
    return CppExtension(
        "weakref_ext._C",
        [f"csrc/{name}" for kind, name in lines if kind in kinds],
        extra_compile_args=flags + sanitize,
        extra_link_args=sanitize,
        **cuda,
    )


def build_extension():
    class Build(BuildExtension):
        def run(self):
            super().run()
            facts = dict(torch=torch.__version__, cuda=torch.version.cuda, python=platform.python_version())
            facts.update(cuda_part=("WEAKREF_EXT_CUDA", None) in self.extensions[0].define_macros)
            Path(self.get_ext_fullpath("weakref_ext._C")).with_name("_build.py").write_text(f"FACTS = {facts!r}\n")

    return Build


if torch is None:
    setup()
else:
    setup(ext_modules=[extension()], cmdclass={"build_ext": build_extension()})
