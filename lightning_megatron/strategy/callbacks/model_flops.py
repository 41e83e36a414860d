"""Model FLOPs of a batch: by the rule of a GPT, or as torch counts those of a module on meta."""

from __future__ import annotations

import copy
import io
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from lightning_megatron.groups.mesh import ParallelMesh
from lightning_megatron.models.gpt import GPT
from lightning_megatron.models.stage import pipelined_modules
from lightning_megatron.pipeline.microbatch import count_samples, count_tokens

#: Errors of modules that cannot be copied, or whose steps read values of their tensors.
_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, LookupError)


class ModelFlops:
    """FLOPs of the forward and backward pass of a whole model, of which a rank may have a part.

    For a module with one GPT, :meth:`GPTConfig.flops_per_token` counts them. Of any other module,
    a copy on the meta device, made before the module is cut, runs ``training_step`` once with its
    backward pass, and torch counts its products of matrices; attention counts in full.

    Args:
        module: The user's module, before it is built or cut.
        counts: Whether to count the FLOPs of modules without one GPT.
    """

    def __init__(self, module: LightningModule, counts: bool) -> None:
        self.module = module
        self._twin: LightningModule | None = None
        self._error: Exception | None = None
        if counts:
            try:
                self._twin = _copy_to_meta(module)
            except _ERRORS as error:
                # It matters only if the module has no GPT.
                self._error = error
        #: FLOPs of a token by the length of its sequence, and of a sample.
        self._per_token: dict[int, float] = {}
        self._per_sample: float | None = None

    def of(self, batch: Any) -> float:
        """Return the FLOPs of a batch; 0 if they are not known."""
        if self._per_sample is not None:
            return self._per_sample * count_samples(batch)
        num_tokens = count_tokens(batch)
        num_samples = count_samples(batch)
        seq_length = num_tokens // num_samples
        if seq_length not in self._per_token:
            models = [model for _, model in pipelined_modules(self.module)]
            gpts = [model for model in models if isinstance(model, GPT)]
            if len(gpts) != 1 or not num_tokens:
                self._per_sample = self._counted(batch) / num_samples
                return self._per_sample * num_samples
            self._per_token[seq_length] = gpts[0].config.flops_per_token(seq_length)
        return num_tokens * self._per_token[seq_length]

    def _counted(self, batch: Any) -> float:
        twin = self._twin
        self._twin = None
        try:
            if twin is not None:
                return _count(twin, batch)
        except _ERRORS as error:
            self._error = error
        if self._error is not None:
            rank_zero_info(
                "No FLOPs are logged: they are counted by a run of training_step in a copy of the "
                "module on the meta device, which failed: "
                f"{type(self._error).__name__}: {self._error}"
            )
        return 0.0


def _copy_to_meta(module: LightningModule) -> LightningModule:
    """Copy a module without the values of its tensors."""
    tensors = (*module.parameters(), *module.buffers())
    memo: dict[int, Any] = {id(tensor): tensor.to("meta") for tensor in tensors}
    for parameter in module.parameters():
        meta = memo[id(parameter)]
        memo[id(parameter)] = torch.nn.Parameter(meta, requires_grad=parameter.requires_grad)
    if module.device_mesh is not None:
        memo[id(module.device_mesh)] = ParallelMesh.single("meta")
    trainer = module.trainer
    module.trainer = None
    try:
        return copy.deepcopy(module, memo)
    finally:
        module.trainer = trainer


def _count(twin: LightningModule, batch: Any) -> float:
    """Run a training step with its backward pass on the meta device, and count its FLOPs."""
    quiet = redirect_stdout(io.StringIO())
    for name in ("log", "log_dict"):
        setattr(twin, name, lambda *_, **__: None)
    with torch.random.fork_rng(devices=[]), torch.device("meta"), quiet, torch.enable_grad():
        twin.configure_model()
        twin.to("meta")
        batch = apply_to_collection(batch, Tensor, lambda tensor: tensor.to("meta"))
        with FlopCounterMode(display=False) as counter:
            output = twin.training_step(batch, 0)
            loss: Any = output["loss"] if isinstance(output, Mapping) else output
            loss.backward()
    return float(counter.get_total_flops())
