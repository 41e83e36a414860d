"""Small folders of BERTs and RoBERTas with their tokenizers, and files in the formats of the tasks."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

_TEXT = (
    "the a cat dog man woman house tree river town day night sees likes finds loses eats runs slept "
    "red blue old new big small not never always in on under near who what where when why"
)
WORDS = _TEXT.split()
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PIECES = [*SPECIAL, *WORDS, *"?.,'\"_", "##s", "##ed", "##er"]
SIZES: dict[str, Any] = {
    "vocab_size": len(PIECES), "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip

#: Tokens of the byte-level tokenizer; 256 of them are bytes.
BYTE_PIECES = 520
BYTE_SIZES: dict[str, Any] = {
    "vocab_size": BYTE_PIECES, "type_vocab_size": 1, "bos_token_id": 0, "pad_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


def save_tokenizer(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(PIECES) + "\n")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer", "do_lower_case": True})
    )
    return folder


def save_byte_tokenizer(folder: Path, is_named: bool = True) -> Path:
    """Save the tokenizer of a RoBERTa, whose tokens are words, letters and bytes."""
    import transformers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    signs = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.BpeTrainer(
        vocab_size=BYTE_PIECES, special_tokens=special, initial_alphabet=signs, show_progress=False
    )
    backend.train_from_iterator([*WORDS, *(f" {word}" for word in WORDS)], trainer)
    model = json.loads(backend.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    transformers.RobertaTokenizerFast(vocab=model["vocab"], merges=merges).save_pretrained(folder)
    if not is_named:
        (folder / "tokenizer_config.json").unlink()
    return folder


#: Functions that save a tokenizer, by the kind of model that reads its tokens.
TOKENIZERS = {"bert": save_tokenizer, "roberta": save_byte_tokenizer}


def save_encoder(folder: Path, kind: str = "BertModel", dropout: float = 0.0, **sizes: Any) -> Path:
    """Save a BERT or RoBERTa of a class of transformers with large random weights, and a
    tokenizer.
    """
    import transformers

    is_bert = kind.startswith("Bert")
    defaults = SIZES if is_bert else SIZES | BYTE_SIZES
    config = (transformers.BertConfig if is_bert else transformers.RobertaConfig)(
        **{**defaults, **sizes}, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(5)
    model = getattr(transformers, kind)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(float(name.endswith("LayerNorm.weight")), 0.3)
    model.save_pretrained(folder)
    return TOKENIZERS["bert" if is_bert else "roberta"](folder)


def sentence(draw: random.Random, least: int = 2, most: int = 9) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(least, most)))


def write_table(path: Path, columns: list[str], rows: list[list[str]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join("\t".join(row) for row in [columns, *rows]) + "\n", encoding="utf-8")
    return path


def write_mnli(folder: Path, num_train: int = 40, num_val: int = 11) -> Path:
    draw = random.Random(1)
    columns = ["index", "genre", "sentence1", "sentence2", "label1", "gold_label"]
    sizes = {"train": num_train, "dev_matched": num_val, "dev_mismatched": num_val - 2}
    for name, size in sizes.items():
        rows = []
        for at in range(size):
            texts = [sentence(draw), f'"{sentence(draw)}']
            label = draw.choice(["contradiction", "entailment", "neutral"])
            rows.append([str(at), "fiction", *texts, "neutral", label])
        write_table(folder / f"{name}.tsv", columns, rows)
    return folder


def write_qqp(folder: Path, num_train: int = 20, num_val: int = 13) -> Path:
    draw = random.Random(2)
    columns = ["id", "qid1", "qid2", "question1", "question2", "is_duplicate"]
    for name, size in (("train", num_train), ("dev", num_val)):
        rows = [
            [str(at), "1", "2", sentence(draw) + "?", sentence(draw) + "?", draw.choice("01")]
            for at in range(size)
        ]
        write_table(folder / f"{name}.tsv", columns, rows)
    return folder


def write_race(folder: Path) -> Path:
    """Write files of three questions each, some of which have their option in the middle."""
    draw = random.Random(3)
    for part, size in (("train", 5), ("dev", 2), ("test", 1)):
        for group in ("middle", "high"):
            (folder / part / group).mkdir(parents=True, exist_ok=True)
            for number in range(size):
                article = f"{sentence(draw)}. {sentence(draw)}."
                cloze = f"{sentence(draw, 1, 3)} _ {sentence(draw, 1, 2)}."
                content = {
                    "article": article,
                    "questions": [cloze, "why?", "who?"],
                    "options": [[sentence(draw, 1, 2) for _ in "ABCD"] for _ in range(3)],
                    "answers": [draw.choice("ABCD") for _ in range(3)],
                    "id": f"{group}{number}.txt",
                }
                (folder / part / group / f"{number}.txt").write_text(json.dumps(content))
    return folder


def squad_content(draw: random.Random, num: int, may_lack: bool) -> dict[str, Any]:
    """Return articles of one paragraph with two questions each, in the format of SQuAD."""
    articles = []
    for number in range(num):
        context = f"{sentence(draw, 6, 24)}, {sentence(draw, 2, 9)}."
        words, questions = context.split(" "), []
        for index in range(2):
            first = draw.randrange(len(words) - 2)
            text = " ".join(words[first : first + draw.randint(1, 2)])
            answer = {"text": text, "answer_start": len(" ".join([*words[:first], ""]))}
            question = {"id": f"{number}-{index}", "question": f"{sentence(draw, 1, 3)}?"}
            question["answers"] = [answer]
            if may_lack:
                question["is_impossible"] = (number + index) % 3 == 0
            if question.get("is_impossible"):
                question |= {"answers": [], "plausible_answers": [answer]}
            questions.append(question)
        articles.append({"title": "t", "paragraphs": [{"context": context, "qas": questions}]})
    return {"version": "v", "data": articles}


def write_squad(folder: Path, version: str = "2.0", num_train: int = 10, num_val: int = 4) -> Path:
    draw = random.Random(4)
    folder.mkdir(parents=True, exist_ok=True)
    for part, size in (("train", num_train), ("dev", num_val)):
        content = squad_content(draw, size, version == "2.0")
        (folder / f"{part}-v{version}.json").write_text(json.dumps(content))
    return folder


def write_tasks(root: Path, family: str) -> None:
    """Save models of a family, with files to train them on: ``classes``, ``options``, ``spans``."""
    save_encoder(root / "classes", f"{family}ForSequenceClassification", num_labels=3)
    save_encoder(root / "options", f"{family}ForMultipleChoice")
    save_encoder(root / "spans", f"{family}ForQuestionAnswering")
    write_mnli(root / "classes_files")
    write_race(root / "options_files")
    write_squad(root / "spans_files")
