"""Check that both archives hold the files behind the package's links: recipes and CUDA sources."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path

folder = Path(sys.argv[1])
(wheel,) = folder.glob("*.whl")
(source,) = folder.glob("*.tar.gz")
with zipfile.ZipFile(wheel) as archive:
    in_wheel = set(archive.namelist())
with tarfile.open(source) as archive:
    in_source = {
        member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()
    }
linked = {
    "lightning_megatron/recipes": Path("recipes"),
    "lightning_megatron/kernels/cuda/csrc": Path("kernels/csrc"),
}
expected = {
    f"{link}/{path.relative_to(target).as_posix()}"
    for link, target in linked.items()
    for path in target.rglob("*")
    if path.is_file()
}
for name, files in ((wheel.name, in_wheel), (source.name, in_source)):
    missing = sorted(expected - files)
    if missing:
        raise SystemExit(f"{name} lacks {', '.join(missing)}")
