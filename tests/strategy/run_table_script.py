"""Script of a user without any settings of logging: a dense model, a model in stages, or a model
with experts in all layers or in those of the last pipeline stage alone.

The dense model overflows in its first step. The script runs as in a source tree that was never
installed: the distribution's metadata cannot be found.
"""

from __future__ import annotations

import sys
from importlib import metadata

import lightning as L

from lightning_megatron import MegatronStrategy
from lightning_megatron.strategy.optimization.precision import MegatronPrecision
from lightning_megatron.training.loss_scale import DynamicLossScale
from tests.strategy.tiny import TinyLM, loader

_find_distribution = metadata.Distribution.from_name


def _hide_this_package(name: str) -> metadata.Distribution:
    if name.replace("_", "-") == "lightning-megatron":
        raise metadata.PackageNotFoundError(name)
    return _find_distribution(name)


def main(kind: str) -> None:
    """Train a few steps."""
    metadata.Distribution.from_name = staticmethod(_hide_this_package)  # type: ignore[method-assign]
    options = {"accelerator": "cpu", "max_steps": 4, "logger": False, "enable_progress_bar": False}
    if kind == "dense":
        scale = DynamicLossScale(initial=2.0**40, hysteresis=1)
        model = TinyLM()
        options |= {"devices": 1, "plugins": [MegatronPrecision("16-mixed", scale)]}
        strategy = MegatronStrategy()
    elif kind == "stages":
        model = TinyLM(num_layers=4)
        options["devices"] = 2
        strategy = MegatronStrategy(pp=2, stage_layers="E|t*4L")
    else:
        experts = {"num_experts": 4, "top_k": 1, "ffn_hidden_size": 16}
        model = TinyLM(experts=experts, mlp_bias=False)
        options |= {"devices": 2, "precision": "bf16-mixed"}
        strategy = MegatronStrategy(tp=2, ep=2, etp=1)
    if kind == "experts of a later stage":
        model = TinyLM(experts={**experts, "layers": (False, True)}, mlp_bias=False)
        strategy = MegatronStrategy(pp=2, stage_layers=[1, 1])
    trainer = L.Trainer(strategy=strategy, enable_checkpointing=False, **options)
    trainer.fit(model, loader())


if __name__ == "__main__":
    main(sys.argv[1])
