"""shardd for PyTorch: the optimizer's state lives in a daemon, not in the trainer.

    import shardd
    opt = shardd.Optimizer(model, lr=3e-4)          # instead of torch.optim.AdamW

`Optimizer` is a `torch.optim.Optimizer`. fp32 masters, moments and step counts are held by a
shardd daemon: a trainer that is killed goes on at the step after the last committed one, without
a checkpoint, and ranks share one copy of the state (ZeRO stages 0 to 3).
"""

from shardd import _native
from shardd.data import ResumableLoader
from shardd.deepspeed.engine import Engine, initialize
from shardd.errors import Error, ParameterChanged, Regrouped
from shardd.optimizer import Optimizer
from shardd.rng import Rng

__version__: str = _native.version

__all__ = [
    "Engine",
    "Error",
    "Optimizer",
    "ParameterChanged",
    "Regrouped",
    "ResumableLoader",
    "Rng",
    "initialize",
]
