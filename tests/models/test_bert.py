"""BERT equals BertForPreTraining and MegatronBertForPreTraining, and has the sizes of the paper."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from lightning_megatron.models.encoder import Encoder, EncoderInput
from lightning_megatron.models.encoder_config import EncoderConfig
from tests.models.flash_stand_in import flash_stand_in
from tests.models.test_settings import in_float64
from tests.oracles import assert_equal

transformers = pytest.importorskip("transformers")

VOCABULARY = 61
LENGTH = 12
SIZES = {"vocab_size": VOCABULARY, "num_positions": 16, "num_layers": 3, "hidden_size": 24}
SIZES |= {"num_heads": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0, "init_std": 0.2}
#: Names of parameters of this package and of transformers, for each order of norms below.
OUTSIDE_LAYERS = {
    "embedding.word": "bert.embeddings.word_embeddings",
    "embedding.position": "bert.embeddings.position_embeddings",
    "embedding.token_type": "bert.embeddings.token_type_embeddings",
    "head.dense": "cls.predictions.transform.dense",
    "head.norm": "cls.predictions.transform.LayerNorm",
    "head.pooler.dense": "bert.pooler.dense",
    "head.order": "cls.seq_relationship",
}
NORM_OUTSIDE_LAYERS = {
    "post": {"embedding.norm": "bert.embeddings.LayerNorm"},
    "pre": {"final_norm": "bert.encoder.ln"},
}
IN_LAYERS = {
    "attention.output": "attention.output.dense",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
}
NORMS_IN_LAYERS = {
    "post": {"attention_norm": "attention.output.LayerNorm", "mlp_norm": "output.LayerNorm"},
    "pre": {"attention_norm": "attention.ln", "mlp_norm": "ln"},
}


def theirs(order: str) -> nn.Module:
    kind = {"post": "Bert", "pre": "MegatronBert"}[order]
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCABULARY, hidden_size=24, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=96, max_position_embeddings=16, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(4)
    model = getattr(transformers, f"{kind}ForPreTraining")(config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    return model


def renamed(values: dict[str, Tensor], order: str) -> dict[str, Tensor]:
    """Return the tensors of a transformers model by the names of this package."""
    names, tensors = OUTSIDE_LAYERS | NORM_OUTSIDE_LAYERS[order], {}
    for layer in range(3):
        start = f"bert.encoder.layer.{layer}"
        for name, their_name in (IN_LAYERS | NORMS_IN_LAYERS[order]).items():
            names[f"layers.{layer}.{name}"] = f"{start}.{their_name}"
        for kind in ("weight", "bias"):
            parts = [f"{start}.attention.self.{part}.{kind}" for part in ("query", "key", "value")]
            qkv = torch.cat([values[part] for part in parts])
            tensors[f"layers.{layer}.attention.qkv.{kind}"] = qkv
    for name, their_name in names.items():
        for kind in ("weight", "bias"):
            if f"{their_name}.{kind}" in values:
                tensors[f"{name}.{kind}"] = values[f"{their_name}.{kind}"]
    tensors["head.bias"] = values["cls.predictions.bias"]
    return tensors


def build_encoder(order: str) -> Encoder:
    sizes = {**SIZES, "ffn_hidden_size": 96, "norm_position": order, "vocab_multiple": 1}
    with in_float64():
        return Encoder(EncoderConfig.bert(**sizes), seed=3)


@pytest.mark.parametrize("kernel", ["mask", "lengths", "flash"])
@pytest.mark.parametrize("order", ["post", "pre"])
def test_losses_and_gradients_equal_transformers(order, kernel):
    model = build_encoder(order)
    reference = theirs(order)
    weights = {name: parameter.detach() for name, parameter in reference.named_parameters()}
    model.load_state_dict(renamed(weights, order), strict=True)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (3, LENGTH), generator=generator)
    valid = torch.arange(LENGTH) < torch.tensor([[12], [9], [7]])
    types = (torch.arange(LENGTH) >= torch.tensor([[5], [4], [3]])).long()
    labels = torch.where(torch.rand(3, LENGTH, generator=generator) < 0.4, tokens.flip(0), -100)
    labels[~valid] = -100
    order_labels = torch.tensor([0, 1, 1])

    expected = reference(
        input_ids=tokens, attention_mask=valid.long(), token_type_ids=types, labels=labels,
        next_sentence_label=order_labels,
    )  # fmt: skip
    expected.loss.backward()
    rows = EncoderInput(tokens, valid=valid, token_types=types)
    if kernel != "mask":
        rows = EncoderInput(tokens, token_types=types, lengths=valid.sum(1))
    with flash_stand_in() if kernel == "flash" else nullcontext([]) as spans:
        result = model(rows, labels)
        logits = model(rows).logits
        assert len(spans) == (6 if kernel == "flash" else 0)
    # Logits of padding are equal, too: its queries attend to the same keys.
    assert_equal(logits.transpose(0, 1), expected.prediction_logits, "token logits")
    assert_equal(result.order_logits, expected.seq_relationship_logits, "order logits")
    loss = result.losses.sum() / (labels != -100).sum()
    loss = loss + nn.functional.cross_entropy(result.order_logits, order_labels)
    assert_equal(loss, expected.loss, "loss")
    with flash_stand_in() if kernel == "flash" else nullcontext():
        loss.backward()
    their_gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    our_gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, gradient in renamed(their_gradients, order).items():
        assert_equal(our_gradients[name], gradient, name)
    assert our_gradients.keys() == renamed(their_gradients, order).keys()


@pytest.mark.parametrize(
    ("size", "count"), [("336m", 336_226_108), ("1.3b", 1_280_595_772), ("3.9b", 3_869_081_404)]
)
def test_the_sizes_of_the_paper_have_its_numbers_of_parameters(size, count):
    config = EncoderConfig.bert(size)
    with torch.device("meta"):
        model = Encoder(config)
        reference_config = transformers.MegatronBertConfig(
            vocab_size=30522, hidden_size=config.hidden_size, num_attention_heads=config.num_heads,
            num_hidden_layers=config.num_layers, intermediate_size=config.ffn_hidden_size,
        )  # fmt: skip
        reference = transformers.MegatronBertForPreTraining(reference_config)
    # The table of tokens is padded to a multiple of 128 rows.
    padding = -30522 % 128 * (config.hidden_size + 1)
    assert sum(parameter.numel() for parameter in model.parameters()) == count + padding
    assert sum(parameter.numel() for parameter in reference.parameters()) == count
    assert config.hidden_size // config.num_heads == 64


def test_weights_before_residual_sums_have_a_smaller_initial_std():
    model = Encoder(EncoderConfig.bert(**SIZES | {"hidden_size": 96}, ffn_hidden_size=192), seed=1)
    for layer in model.layers.values():
        wide, narrow = (layer.attention.qkv, layer.mlp.up), (layer.attention.output, layer.mlp.down)
        for linear in (*wide, *narrow):
            std = 0.2 if linear in wide else 0.2 / 6**0.5
            assert float(linear.weight.detach().std()) == pytest.approx(std, rel=0.05)
