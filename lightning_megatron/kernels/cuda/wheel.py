"""Wheels of a built library, for machines without compilers.

A wheel works with every supported version of Python and torch, because the library uses torch's
stable ABI only. The package finds the library by the key of its sources, so it never loads one of
other sources.
"""

from __future__ import annotations

import csv
import hashlib
import sysconfig
from base64 import urlsafe_b64encode
from io import StringIO
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.kernels.cuda.library import DESCRIPTION, WHEEL_PACKAGE, BuiltLibrary
from lightning_megatron.kernels.cuda.sources import Sources

_PROJECT = "lightning-megatron"
#: Licence of CUTLASS, which must be distributed with its compiled templates.
_CUTLASS_LICENSE = Path(__file__).parent / "CUTLASS_LICENSE.txt"
_METADATA = """Metadata-Version: 2.4
Name: {name}
Version: {version}
Summary: The CUDA kernels of {project}, compiled for compute capability 9.0
License-Expression: Apache-2.0 AND BSD-3-Clause AND LicenseRef-NVIDIA-CUDA-EULA
License-File: {license}
Requires-Dist: {project}=={release}

The kernels of {project} {release}, compiled from its sources {key}
with nvcc {nvcc} and CUTLASS {cutlass}.
{project} finds them by that key; there is nothing to import here.
"""
_WHEEL = """Wheel-Version: 1.0
Generator: {project} ({release})
Root-Is-Purelib: false
Tag: {tag}
"""


def build_wheel(out: Path, library: BuiltLibrary, sources: Sources, release: str) -> Path:
    """Write the wheel of a library of a release into a folder and return its path.

    The wheel of a library is reproducible byte by byte. The key of the sources is the local part of
    the version, so pip replaces a wheel of other sources even if the release is the same.
    """
    version = f"{release}+src{sources.key}"
    # The library links to torch, which the manylinux policies do not allow. The tag names the
    # system only.
    tag = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
    info = f"{WHEEL_PACKAGE}-{version}.dist-info"
    words = {
        "project": _PROJECT,
        "release": release,
        "name": WHEEL_PACKAGE.replace("_", "-"),
        "version": version,
    }
    words |= {
        "key": sources.key,
        "nvcc": library.nvcc,
        "cutlass": library.cutlass,
        "license": _CUTLASS_LICENSE.name,
    }
    inside = f"{WHEEL_PACKAGE}/{library.path.parent.name}"
    docstring = f'"""The compiled kernels of {_PROJECT}, which finds them by itself."""\n'
    files = {
        f"{WHEEL_PACKAGE}/__init__.py": docstring.encode(),
        f"{inside}/{library.path.name}": library.path.read_bytes(),
        f"{inside}/{DESCRIPTION}": (library.path.parent / DESCRIPTION).read_bytes(),
        f"{info}/licenses/{_CUTLASS_LICENSE.name}": _CUTLASS_LICENSE.read_bytes(),
        f"{info}/METADATA": _METADATA.format(**words).encode(),
        f"{info}/WHEEL": _WHEEL.format(**words, tag=tag).encode(),
    }
    path = out / f"{WHEEL_PACKAGE}-{version}-{tag}.whl"
    try:
        out.mkdir(parents=True, exist_ok=True)
        _write_archive(path, {**files, f"{info}/RECORD": _record(files, f"{info}/RECORD")})
    except OSError as error:
        raise UnsupportedError(
            f"the folder of the wheel must be writable: {out} is not ({error}). Use another folder "
            "with --out.",
        ) from error
    return path


def _record(files: dict[str, bytes], own_name: str) -> bytes:
    text = StringIO()
    rows = csv.writer(text, lineterminator="\n")
    for name, content in files.items():
        digest = urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.writerow((name, f"sha256={digest}", len(content)))
    rows.writerow((own_name, "", ""))
    return text.getvalue().encode()


def _write_archive(path: Path, files: dict[str, bytes]) -> None:
    with ZipFile(path, "w") as archive:
        for name, content in files.items():
            member = ZipInfo(name)  # dated 1980, so that the bytes do not depend on the time
            member.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
            archive.writestr(member, content, compress_type=ZIP_DEFLATED)
