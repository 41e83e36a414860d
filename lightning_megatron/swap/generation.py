"""Hugging Face's own generation, over the layers of a GPT."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn

from lightning_megatron.errors import UnsupportedError
from lightning_megatron.swap.language_model import HuggingFaceLM


def generating(model: HuggingFaceLM, source: nn.Module) -> HuggingFaceLM:
    """Return the same model with the methods of Hugging Face's GenerationMixin.

    ``generate`` takes what it takes there: searches, sampling, stopping rules. Nothing is cached, so that every token
    costs a pass over all before it. Tensor-parallel ranks must call it together, with the same prompts; ranks of other
    data need not.

    Args:
        model: The layers behind Hugging Face's call.
        source: The model that they replace, whose settings of generation are kept.

    Communication: that of one forward pass for each token.
    """
    mixin: Any = sys.modules["transformers"].GenerationMixin

    class GeneratingLM(HuggingFaceLM, mixin):
        """A causal language model that generates, too."""

        _is_stateful = False

        def generate(self, *args: Any, **kwargs: Any) -> Tensor:
            """Continue prompts; see transformers.GenerationMixin.generate.

            Raises:
                UnsupportedError: With pipeline stages.
            """
            if self.gpt.mesh.pp.size > 1:
                raise UnsupportedError(
                    f"generate is not available with pp ({self.gpt.mesh.pp.size}) above 1, because every token would "
                    "have to go through all stages in turn. Generate with pp 1; checkpoints load there."
                )
            found: Tensor = super().generate(*args, **{**kwargs, "use_cache": False})
            return found

        def is_remote_code(self) -> bool:
            """Tell that the model is of this package."""
            return False

        def get_experts_implementation(self) -> dict[str, str]:
            """Tell that there are no experts."""
            return {}

    result: Any = GeneratingLM(model.gpt, model.config, model.family)
    result.generation_config = getattr(source, "generation_config", None)
    found: HuggingFaceLM = result
    return found
