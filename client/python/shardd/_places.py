"""Where this process stands: its rank, its daemon, the name of its job."""

from __future__ import annotations

import os
import pathlib
import re
import sys
from typing import Any, Dict, Optional, Tuple

import torch

_names_taken: Dict[str, int] = {}


def rank_and_world() -> Tuple[int, int]:
    """Of torch.distributed where it is initialised, else of RANK and WORLD_SIZE."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    try:
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError as error:
        raise ValueError("the environment variables RANK and WORLD_SIZE must be numbers; they are "
                         f"{os.environ.get('RANK')!r} and {os.environ.get('WORLD_SIZE')!r}"
                         ) from error
    return rank, world


def job_name(given: Optional[str]) -> str:
    """The given name, else SHARDD_JOB, else that of the script; the n-th without a name of
    its own gets "-n" after it, so that a script started again finds the same jobs."""
    if given is not None:
        return given
    base = os.environ.get("SHARDD_JOB", "")
    if not base:
        main = getattr(sys.modules.get("__main__"), "__file__", None)
        base = pathlib.Path(main).stem if main and not main.startswith("<") else "notebook"
        base = re.sub(r"[^A-Za-z0-9._-]", "-", base).lstrip(".")[:56] or "job"
    count = _names_taken.get(base, 0) + 1
    _names_taken[base] = count
    return base if count == 1 else f"{base}-{count}"


def _daemon_binary() -> str:
    given = os.environ.get("SHARDD_DAEMON_BINARY", "")
    packaged = pathlib.Path(__file__).parent / "bin" / "shardd"
    return given or (str(packaged) if packaged.exists() else "")


def session_options(rank: int, world_size: int, address: Optional[str], resume: str
                    ) -> Dict[str, Any]:
    if resume not in ("never", "auto", "must"):
        raise ValueError(f"resume must be 'never', 'auto' or 'must', not {resume!r}")
    try:
        reconnect = float(os.environ.get("SHARDD_RECONNECT_SECONDS", "60"))
    except ValueError as error:
        raise ValueError("the environment variable SHARDD_RECONNECT_SECONDS must be seconds"
                         ) from error
    return {
        "address": os.environ.get("SHARDD_ADDRESS", "") if address is None else address,
        "rank": rank,
        "world_size": world_size,
        # torchrun starts all ranks again, shardctl run one alone.
        "restarted": os.environ.get("SHARDD_RESTART_COUNT", "0") not in ("", "0"),
        "daemon_binary": _daemon_binary(),
        "connect_seconds": 10.0,
        "reconnect_seconds": reconnect,
        "resume": resume,
    }
