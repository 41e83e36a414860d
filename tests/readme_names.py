"""Names that the README's first example leaves to its reader: a module and data."""

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_megatron import GPT, GPTConfig

L.seed_everything(1)
datamodule = DataLoader(TensorDataset(torch.randint(256, (16, 17))), batch_size=4)


class MyLightningModule(L.LightningModule):
    """A small GPT."""

    def configure_model(self) -> None:
        """Build this rank's part."""
        config = GPTConfig.gpt2(
            vocab_size=256, max_seq_length=16, num_layers=2, hidden_size=32, num_heads=2
        )
        self.gpt = GPT(config, mesh=self.device_mesh)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the mean loss."""
        return self.gpt(batch[0][:, :-1], labels=batch[0][:, 1:]).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters())
