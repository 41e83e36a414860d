"""The command ``plan``: the fastest layouts of a training that fit, before any GPU is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser
from jsonargparse.typing import PositiveFloat, PositiveInt
from lightning.pytorch import LightningDataModule, LightningModule

from lightning_megatron.cli.draw_layout import check_picture, draw_layout
from lightning_megatron.cli.tune import STRATEGY, settings_of
from lightning_megatron.errors import UnsupportedError
from lightning_megatron.forecast.cluster import Cluster
from lightning_megatron.forecast.layout_plans import LayoutPlan
from lightning_megatron.models.hugging_face_lm import HuggingFaceCausalLM
from lightning_megatron.plan.global_batch import GlobalBatch
from lightning_megatron.recipe_files import PREFIX
from lightning_megatron.strategy.layout_choice import SEARCHED, as_yaml
from lightning_megatron.strategy.megatron_strategy import MegatronStrategy
from lightning_megatron.strategy.plan_layout import plan_layout

EXAMPLES = """examples:
  lightning-megatron plan -c recipe:llama3_8b_sft_8gpus --model.path FOLDER --gpus 64
  lightning-megatron plan --model Qwen/Qwen3-8B --gpus 8 --seq_length 8192 --global_batch 64
  lightning-megatron plan -c my_recipe.yaml --gpus 16 --write planned.yaml
  lightning-megatron fit -c planned.yaml"""


_CHOSEN = {*SEARCHED, "layout"}


@dataclass(frozen=True)
class Job:
    """What is trained, and with which options.

    Args:
        module: Module, which has built no model.
        options: Options of the strategy that stay.
        batch: Global batch; None if it is not known.
        seq_length: Tokens of a sample; None if they are not known.
        num_gpus: Devices of the recipe; None if they are not known.
        is_of_ranks: Whether the recipe gives the batch of a data-parallel rank.
    """

    module: LightningModule
    options: Mapping[str, Any]
    precision: str
    batch: GlobalBatch | None = None
    seq_length: int | None = None
    num_gpus: int | None = None
    is_of_ranks: bool = False

    @classmethod
    def of_recipe(cls, fit_options: Sequence[str]) -> Job:
        """Read what the options of ``fit`` would train."""
        settings = settings_of(fit_options, "plan")
        trainer = settings["trainer"]
        strategy = trainer["strategy"]
        is_ours = isinstance(strategy, dict) and strategy["class_path"] == STRATEGY
        given = strategy["init_args"] if is_ours and isinstance(strategy, dict) else {}
        module = _built(LightningModule, settings["model"])
        data = _built(LightningDataModule, settings["data"])
        num_gpus = None
        if isinstance(trainer["devices"], int):
            num_gpus = trainer["devices"] * trainer["num_nodes"]
        batch = getattr(data, "global_batch", None)
        samples, seq_length = getattr(data, "tokens_shape", (None, None))
        if batch is None and isinstance(samples, int) and num_gpus is not None:
            share = int(given.get("tp", 1)) * int(given.get("pp", 1)) * int(given.get("cp", 1))
            accumulated = trainer["accumulate_grad_batches"]
            batch = GlobalBatch(samples * max(1, num_gpus // share) * accumulated)
        # The search chooses what the recipe has chosen for its own number of GPUs.
        kept = {name: value for name, value in given.items() if name not in _CHOSEN}
        precision = str(trainer["precision"] or "32-true")
        is_of_ranks = samples is not None
        return cls(module, kept, precision, batch, seq_length, num_gpus, is_of_ranks)

    def sizes(self) -> tuple[int, GlobalBatch, int]:
        """Return the number of devices, the global batch and the tokens of a sample.

        Raises:
            UnsupportedError: If one is not known.
        """
        if self.num_gpus is None or self.batch is None or self.seq_length is None:
            sizes: dict[str, Any] = {"gpus": self.num_gpus, "global_batch": self.batch}
            sizes["seq_length"] = self.seq_length
            missing = ", ".join(f"--{name}" for name, value in sizes.items() if value is None)
            raise UnsupportedError(
                f"plan needs the sizes of the training: it does not know {missing}. Give them as "
                "options."
            )
        return self.num_gpus, self.batch, self.seq_length


def _built(base: type[Any], settings: Any) -> Any:
    parser = ArgumentParser()
    parser.add_subclass_arguments(base, "part")
    parsed = parser.parse_object({"part": settings})
    return parser.instantiate(parsed)["part"]


@dataclass(frozen=True)
class Devices:
    """GPUs of a job, as options.

    Args:
        gpus: Number of GPUs; by default that of the recipe.
        gpus_per_node: GPUs of a node.
        gpu: Kind of GPU: h200, h100, or one with a file of speeds.
        memory: Memory of a GPU that the training may use (GiB); by default what CUDA leaves.
        network: Bandwidth between nodes, of each GPU and direction (GB/s).
        speeds: File that doctor --calibrate wrote.
    """

    gpus: PositiveInt | None = None
    gpus_per_node: PositiveInt = 8
    gpu: str = "h200"
    memory: PositiveFloat | None = None
    network: PositiveFloat = 50.0
    speeds: str | None = None

    def cluster(self, num_gpus: int) -> Cluster:
        """Return the description of a cluster of some GPUs."""
        return Cluster(
            num_gpus=num_gpus,
            gpus_per_node=self.gpus_per_node,
            gpu=self.gpu,
            memory=self.memory,
            network=self.network * 1e9,
            speeds=self.speeds,
        )


def plan(
    devices: Devices,
    model: str | None = None,
    seq_length: PositiveInt | None = None,
    global_batch: PositiveInt | None = None,
    fp8: bool = False,
    most: PositiveInt = 10,
    write: Path | None = None,
    png: Path | None = None,
    fit_options: Sequence[str] = (),
) -> None:
    """Search the fastest layouts and options of a training that fit, by estimates.

    No GPU is needed. The layout of the recipe has no effect: tp, pp, vpp, cp, ep, etp, schedule,
    microbatch_size, recompute, cuda_graphs and fp8 are chosen. A recipe and options of fit follow,
    or --model names a model: plan [options] -c RECIPE [options of fit].

    Args:
        model: Hugging Face folder, or name on the Hub, instead of a recipe.
        seq_length: Tokens of a sample; by default those of the recipe.
        global_batch: Samples of a step; by default those of the recipe.
        fp8: Allow products in 8 bits, which change the losses.
        most: Layouts that are shown.
        write: New recipe with the best plan.
        png: Draw the ranks of the best plan into this .png, .svg or .pdf file.
    """
    if png is not None:
        check_picture(png)
    if (model is None) == (not fit_options):
        raise UnsupportedError("plan needs a recipe or a model. Give either -c RECIPE or --model.")
    job = Job.of_recipe(fit_options) if model is None else _of_model(model)
    job = replace(
        job,
        batch=job.batch if global_batch is None else GlobalBatch(global_batch),
        seq_length=seq_length or job.seq_length,
        num_gpus=devices.gpus or job.num_gpus,
    )
    num_gpus, batch, length = job.sizes()
    cluster = devices.cluster(num_gpus)
    strategy = MegatronStrategy(**job.options)
    options: dict[str, Any] = {"precision": job.precision, "fp8": fp8, "most": most}
    plans = plan_layout(job.module, (batch, length), cluster, strategy=strategy, **options)
    print(
        f"{plans.num_choices:,} legal choices on {num_gpus} x {cluster.gpu}, {batch.size} samples "
        f"of {length:,} tokens a step. Times and memory are estimates.\n\n{plans.table()}\n\n"
        f"The best, for a recipe:\n\n{as_yaml(plans.best)}",
        end="",
    )
    if png is not None:
        layout = plans.best.layout
        draw_layout(layout, png, cluster.gpus_per_node, experts=layout.has_experts)
        print(f"\nrank map: {png}")
    if write is not None:
        _write(write, fit_options, plans.best, job, cluster)


COMMAND = plan


def _of_model(path: str) -> Job:
    arguments: dict[str, Any] = {"path": path, "from_scratch": True}
    return Job(HuggingFaceCausalLM(**arguments), {}, "bf16-mixed")


def _write(
    path: Path,
    fit_options: Sequence[str],
    best: LayoutPlan,
    job: Job,
    cluster: Cluster,
) -> None:
    """Write the recipe with the options of the best plan."""
    recipes = [
        value
        for option, value in zip(fit_options, fit_options[1:], strict=False)
        if option in ("-c", "--config")
    ]
    if len(recipes) != 1:
        raise UnsupportedError(
            f"--write needs one recipe that it changes: -c is given {len(recipes)} times. Name one."
        )
    changes = _changes(best, job, cluster)
    if recipes[0].startswith(PREFIX):
        content = {"recipe": recipes[0].removeprefix(PREFIX)} | changes
    else:
        content = _merged(yaml.safe_load(Path(recipes[0]).read_text(encoding="utf-8")), changes)
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(f"# {best.options}, planned for {cluster.num_gpus} x {cluster.gpu}.\n")
            yaml.safe_dump(content, file, sort_keys=False)
    except OSError as error:
        raise UnsupportedError(
            f"the recipe cannot be written to {path}: {error.strerror}. Name a file that does not "
            "exist, in a folder that does."
        ) from error
    others = [one for one in fit_options if one not in ("-c", "--config", recipes[0])]
    print(f"\nTrain it: lightning-megatron fit -c {' '.join([str(path), *others])}")


def _changes(best: LayoutPlan, job: Job, cluster: Cluster) -> dict[str, Any]:
    """Return the values of a recipe that a plan changes."""
    # A recipe keeps the options that another one does not name.
    options = {**SEARCHED, **best.options}
    nodes = max(1, cluster.num_gpus // cluster.gpus_per_node)
    trainer = {
        "devices": cluster.num_gpus // nodes,
        "num_nodes": nodes,
        "accumulate_grad_batches": 1,
        "strategy": {"class_path": STRATEGY, "init_args": options},
    }
    _, batch, length = job.sizes()
    sizes = {"global_batch_size": batch.size, "seq_length": length}
    if job.is_of_ranks:
        sizes = {"batch_size": batch.size // best.layout.dp, "seq_length": length}
    return {"trainer": trainer, "data": {"init_args": sizes}}


def _merged(base: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested settings with some changed."""
    merged = dict(base) if isinstance(base, Mapping) else {}
    for name, value in changes.items():
        merged[name] = _merged(merged.get(name), value) if isinstance(value, Mapping) else value
    return merged
