"""Time of reducing gradients, of updating parameters and of gathering them again."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_megatron.forecast.chip_speeds import Link
from lightning_megatron.forecast.pass_times import LinkedChip, Times, passes_of
from lightning_megatron.models.config import GPTConfig
from lightning_megatron.plan.buckets import BUCKET_SIZE
from lightning_megatron.plan.budget import TrainingShape
from lightning_megatron.plan.layout import ParallelLayout
from lightning_megatron.plan.shards import padded_vocab_size

#: Elements of a piece of the optimizer's step, behind which gathers start.
_PIECE = 64_000_000


@dataclass(frozen=True)
class UpdateTimes:
    """Times of a stage besides those of its passes (s).

    Args:
        reduction: Reduction of gradients that no backward pass hides.
        optimizer: Norm of the gradients, and update of the parameters.
        gather: Gathers of parameters that neither the update nor a forward pass hides.
    """

    reduction: float
    optimizer: float
    gather: float

    @property
    def seconds(self) -> float:
        """Return the sum of the times."""
        return self.reduction + self.optimizer + self.gather


@dataclass(frozen=True)
class Embedding:
    """Token embedding of the first stage, whose gradient is complete last.

    Args:
        elements: Elements of a rank's part.
        row: Elements of a row.
        rows: Rows of which a step of a rank has gradients.
        by_rows: Whether ranks may exchange rows instead of the whole gradient.
    """

    elements: int
    row: int
    rows: int
    by_rows: bool

    @classmethod
    def of(cls, config: GPTConfig, layout: ParallelLayout, training: TrainingShape) -> Embedding:
        """Return the embedding of a model."""
        vocabulary = padded_vocab_size(config.vocab_size, layout.tp, config.vocab_multiple)
        rows = training.seq_length * training.microbatch_size * training.num_microbatches
        graphs = training.cuda_graphs
        tied_here = config.tie_embeddings and layout.loss_stage == 0
        by_rows = not tied_here and (graphs is None or graphs.mode != "full")
        width = config.hidden_size
        return cls(vocabulary // layout.tp * width, width, rows // layout.cp, by_rows)

    def exchanged(self, ranks: int) -> int | None:
        """Return the elements of the rows of all ranks, if these exchange them; else None.

        They do where each then gets fewer rows than the table has.
        """
        is_less = 2 * self.rows * ranks * self.row <= self.elements
        return self.rows * ranks * self.row if self.by_rows and is_less else None


def update_times(
    times: Times,
    training: TrainingShape,
    chip: LinkedChip,
    embedding: Embedding | None,
    overlaps_gathers: bool,
) -> UpdateTimes:
    """Return the times of a stage after its passes, of which some hide behind the passes.

    Args:
        times: Times of the passes of a microbatch, and numbers of parameters.
        embedding: The embedding, if the stage has it.
        overlaps_gathers: Whether parameters are gathered during the next forward pass.
    """
    speeds = chip.speeds
    hidden = tail = gather = owned = norm = 0.0
    price = 0.0
    collective = "reduce_scatter" if training.zero else "all_reduce"
    for kind, axis in (("dense", "data"), ("experts", "edp")):
        elements = times.get(kind, 0.0)
        link = chip.links[axis]
        part = elements / link.ranks if training.zero else elements
        owned += part
        norm += part * training.gradient_bytes
        if link.ranks == 1 or not elements:
            continue
        price = max(price, speeds.price(collective, link.crosses_nodes))

        def reduced(size: float, link: Link = link) -> float:
            return speeds.collective(collective, size * training.gradient_bytes, link)

        last = min(elements, BUCKET_SIZE)
        of_last = reduced(last)
        if embedding is not None and kind == "dense":
            rows = embedding.exchanged(link.ranks)
            last = embedding.elements
            of_last = reduced(last)
            if rows is not None:
                of_last = speeds.collective("all_gather", rows * training.gradient_bytes, link)
        tail = max(tail, of_last)
        num_buckets = max(1, round((elements - last) / BUCKET_SIZE))
        hidden += num_buckets * reduced((elements - last) / num_buckets)
        if training.zero:
            size = times.get(f"{kind} bytes", 0.0)
            num_buckets = max(1, round(elements / BUCKET_SIZE))
            gather += num_buckets * speeds.collective("all_gather", size / num_buckets, link)
    forward, *backward = passes_of(times)
    reduction = tail + _exposed(hidden, sum(backward), price)
    adam = speeds.optimizer(owned)
    # A gather starts behind the piece of the update that its parameters are in.
    cover = forward if overlaps_gathers else max(0.0, adam * (1 - _PIECE / owned))
    norm_time = speeds.seconds_of_pass(norm)
    return UpdateTimes(reduction, norm_time + adam, _exposed(gather, cover, price))


def _exposed(collectives: float, cover: float, price: float) -> float:
    """Return what collectives add to the time of what runs beside them, and partly hides them."""
    return max(0.0, collectives - cover) + price * min(collectives, cover)
