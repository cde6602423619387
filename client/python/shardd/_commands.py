"""The programs that came with the package, as commands of its environment."""

import os
import pathlib
import sys


def _become(program: str) -> None:
    binary = pathlib.Path(__file__).parent / "bin" / program
    os.execv(binary, [str(binary), *sys.argv[1:]])


def shardctl() -> None:
    _become("shardctl")


def daemon() -> None:
    _become("shardd")
