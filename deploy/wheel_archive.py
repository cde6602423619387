#!/usr/bin/env python3
"""Packs a folder with a package into a wheel: wheel_archive.py FOLDER OUTPUT VERSION README."""

import base64
import hashlib
import pathlib
import sys
import sysconfig
import zipfile

METADATA = """Metadata-Version: 2.1
Name: shardd
Version: {version}
Summary: A daemon owns the optimizer state of your PyTorch training jobs (ZeRO stages 0 to 3)
Requires-Python: =={major}.{minor}.*
Description-Content-Type: text/markdown

{readme}
"""
ENTRY_POINTS = "[console_scripts]\nshardctl = shardd._commands:shardctl\n" \
    "shardd = shardd._commands:daemon\n"


def main():
    folder, output, version, readme = sys.argv[1:]
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    tag = f"{python}-{python}-" + sysconfig.get_platform().replace("-", "_").replace(".", "_")
    files = {}  # name -> (bytes, mode)
    for path in sorted(pathlib.Path(folder).rglob("*")):
        if path.is_file():
            mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
            files[str(path.relative_to(folder))] = (path.read_bytes(), mode)
    info = f"shardd-{version}.dist-info"
    text = METADATA.format(version=version, major=sys.version_info.major,
                           minor=sys.version_info.minor,
                           readme=pathlib.Path(readme).read_text(encoding="utf-8"))
    files[f"{info}/METADATA"] = (text.encode(), 0o644)
    files[f"{info}/WHEEL"] = (f"Wheel-Version: 1.0\nGenerator: shardd\nRoot-Is-Purelib: false\n"
                              f"Tag: {tag}\n".encode(), 0o644)
    files[f"{info}/entry_points.txt"] = (ENTRY_POINTS.encode(), 0o644)
    record = []
    for name, (content, _) in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        record.append(f"{name},sha256={digest},{len(content)}")
    record.append(f"{info}/RECORD,,")
    files[f"{info}/RECORD"] = (("\n".join(record) + "\n").encode(), 0o644)

    wheel = pathlib.Path(output) / f"shardd-{version}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for name, (content, mode) in files.items():
            entry = zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))
            entry.external_attr = (0o100000 | mode) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
    print(wheel)


main()
