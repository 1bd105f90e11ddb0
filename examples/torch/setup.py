"""Builds gmm_torch with the compiler settings of the installed torch, against the headers of this repository:

    pip install --no-build-isolation ./examples/torch

A torch with CUDA gets all engines for the GPUs that this machine has, or for TORCH_CUDA_ARCH_LIST. GMM_TORCH_CUDA=0
builds the CPU engine alone.
"""
import os
import sys
from pathlib import Path

from setuptools import setup

try:
    import torch
    from torch.utils import cpp_extension
except ImportError as e:
    sys.exit(f"gmm_torch: torch cannot be imported ({e}). It is built for the torch that is installed: "
             "pip install --no-build-isolation ./examples/torch")

HERE = Path(__file__).resolve().parent
HEADERS = HERE.parents[1]
if not (HEADERS / "gmm.h").exists():
    sys.exit(f"gmm_torch: no gmm.h in {HEADERS}: install from the folder examples/torch of the repository")


def architectures():
    """What nvcc compiles for, as TORCH_CUDA_ARCH_LIST has it. An sm_90 build would have no WGMMA engine."""
    named = os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(";", " ").split()
    if not named:
        if not torch.cuda.is_available():
            sys.exit("gmm_torch: this torch has CUDA, but there is no GPU here to build for. Set "
                     "TORCH_CUDA_ARCH_LIST=9.0a for Hopper (8.0 for an A100), or GMM_TORCH_CUDA=0 for the CPU engine "
                     "alone")
        found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
        named = [f"{a}.{b}" + ("a" if (a, b) == (9, 0) else "") for a, b in sorted(found)]
    plain = [a for a in named if a.split("+")[0] in ("9.0", "Hopper")]
    if plain and not any(a.startswith("9.0a") for a in named):
        sys.exit(f"gmm_torch: TORCH_CUDA_ARCH_LIST={' '.join(named)} would lose the Hopper engine (WGMMA), which needs "
                 "9.0a: write 9.0a instead of 9.0")
    return " ".join(named)


cuda = torch.version.cuda is not None and os.environ.get("GMM_TORCH_CUDA", "1") != "0"
if cuda and cpp_extension.CUDA_HOME is None:
    sys.exit("gmm_torch: this torch has CUDA, but nvcc was not found. Set CUDA_HOME, or GMM_TORCH_CUDA=0 for the CPU "
             "engine alone")
if cuda:
    os.environ["TORCH_CUDA_ARCH_LIST"] = architectures()

# The implementation, as units that ninja compiles side by side.
parts = 8 if cuda else 2
folder = Path("build") / ("parts_cuda" if cuda else "parts_cpu")
os.chdir(HERE)
folder.mkdir(parents=True, exist_ok=True)
units = []
for part in range(parts):
    unit = folder / f"gmm_{part}.{'cu' if cuda else 'cpp'}"
    text = f"#define GMM_PARTS {parts}\n#define GMM_PART {part}\n#define GMM_IMPLEMENTATION\n#include \"gmm.h\"\n"
    if not unit.exists() or unit.read_text() != text:
        unit.write_text(text)
    units.append(str(unit))

host = ["-O3", "-fopenmp", "-fvisibility=hidden", "-Wno-unused-function", "-Wno-deprecated-enum-float-conversion"]
device = ["-O3", "-Xcompiler=" + ",".join(host[1:] + ["-Wno-deprecated-enum-enum-conversion"])]
defines = [("GMM_NO_CUBLASLT", None)] + ([("GMM_TORCH_CUDA", None)] if cuda else [])
extension = (cpp_extension.CUDAExtension if cuda else cpp_extension.CppExtension)(
    "gmm_torch._C",
    ["gmm_torch/ops.cpp", "gmm_torch/autograd.cpp"] + units,
    include_dirs=[str(HEADERS)],
    depends=["gmm_torch/call.h"] + [str(p) for p in HEADERS.glob("gmm*.*h")],
    define_macros=defines,
    extra_compile_args={"cxx": host, "nvcc": device} if cuda else host,
    extra_link_args=["-fopenmp"])

setup(name="gmm_torch", version="0.1.0", packages=["gmm_torch"], ext_modules=[extension],
      cmdclass={"build_ext": cpp_extension.BuildExtension.with_options(no_python_abi_suffix=True)})
