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
    costs a pass over all before it. The tensor-parallel ranks and the stages of one copy must call it together, with
    the same prompts; ranks of other data need not. With pp it is for hooks between steps, such as
    on_validation_epoch_end.

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
                UnsupportedError: Inside a step, with pipeline stages.
            """
            if self.gpt.cursor is not None:
                raise UnsupportedError(
                    f"generate cannot run inside a step with pp ({self.gpt.mesh.pp.size}) above 1, because its stages "
                    "are busy with other microbatches. Call it between steps, such as in on_validation_epoch_end, or "
                    "use pp 1."
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
