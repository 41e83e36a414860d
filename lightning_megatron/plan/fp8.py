"""Settings of matrix products in 8 bits, and the sizes that they need."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from lightning_megatron.errors import ParallelPlanError, UnsupportedError
from lightning_megatron.plan.cuda_graphs import GraphMode
from lightning_megatron.plan.settings import Count, Index, Range, coerce_fields, coerced

Backend = Literal["native", "te"]
"""Library that computes parts of this package's layers."""

EnginePart = Literal["products", "norms", "attention", "experts"]
"""Part of the layers that Transformer Engine can compute."""

FP8Recipe = Literal["tensorwise", "delayed", "rowwise", "blockwise", "mxfp8"]
"""How the numbers of a tensor are scaled to the range of 8 bits, as :class:`FP8` describes it."""

#: Rows and columns of a block that shares a scale (elements).
BLOCK = 128
#: Number of partial maxima that the programs of a kernel update: few, because casts read all of
#: them, but several, because programs that update the same maximum wait for each other.
MAGNITUDE_PARTS = 64
#: Recipes with one scale for all numbers of a tensor.
_PER_TENSOR_RECIPES = ("tensorwise", "delayed")
#: Neighbours that share a scale with mxfp8 (elements).
_GROUP = 32
_HISTORY = 1024
#: Methods by which recipes name their kind, with the names of that kind in this package.
_KINDS = {
    "delayed": "delayed",
    "float8_current_scaling": "tensorwise",
    "float8_block_scaling": "blockwise",
    "mxfp8": "mxfp8",
}
_NAMES = "DelayedScaling, Float8CurrentScaling, Float8BlockScaling or MXFP8BlockScaling"
_OTHER_SCALES = "Its weights have other scales by rows than by columns, which one copy cannot have."
#: Why a recipe cannot have weights that are kept in 8 bits.
_REASONS_AGAINST_STORAGE = {
    "rowwise": _OTHER_SCALES,
    "blockwise": "Slices of data ranks do not end where blocks of 128 x 128 end.",
    "mxfp8": _OTHER_SCALES,
}


@dataclass(frozen=True)
class FP8:
    """Linear layers that compute in 8 bits, and how their tensors are scaled.

    The layers are the linear layers of attention, MLPs and shared experts. Embeddings, the head,
    norms, routers and the products of routed experts keep the precision of the run. Gradients and
    optimizer states keep their types, too, and so do weights unless ``parameters`` says otherwise.
    A checkpoint does not depend on this.

    Args:
        recipe: Numbers that share a scale, which is computed from their largest magnitude:
            ``tensorwise`` (all numbers of a tensor), ``delayed`` (the same, with the magnitude of
            earlier steps), ``rowwise`` (the numbers that one product sums up: a row or a column),
            ``blockwise`` (128 neighbours of a row or a column; in weights blocks of 128 x 128) or
            ``mxfp8`` (32 neighbours, with powers of two; only Transformer Engine supports it).
        format: ``e4m3`` has 4 bits of exponent and 3 of fraction. ``hybrid`` is e4m3, but e5m2 for
            gradients of outputs, which has a larger range and fewer digits. None means hybrid for
            tensorwise and delayed, else e4m3.
        first_bf16: Layers at the start of the model that keep the precision of the run.
        last_bf16: Layers at the end of the model that keep the precision of the run.
        keep: Patterns of the names of layers that keep the precision of the run, such as
            ``*.mlp.down`` or ``layers.3.*``.
        history: Steps whose largest magnitude sets the scales of ``delayed`` (optimizer steps).
        margin: Powers of two that ``delayed`` leaves above that magnitude.
        emulate: Whether devices without products in 8 bits, such as CPUs, round to 8 bits and
            multiply in their own precision, which is slow. Without it they are refused.
        te_recipe: Recipe object of Transformer Engine, which sets the recipe, the format, the
            history and the margin; it needs ``linear.backend="te"``.
        cast_weights: How often weights are cast: once for all microbatches of a ``batch``, which
            keep the casts until its end (2 bytes for each weight in 8 bits), or for each product of
            a ``microbatch``. Results are the same. None means batch if a batch has several
            microbatches, unless graphs of segments or Transformer Engine compute them.
        parameters: ``fp8`` keeps trained weights of these layers in 8 bits during a fit, rounded
            from the main parameters, and gathers them over the data ranks in 8 bits; for
            ``tensorwise`` and ``delayed``, in which these weights have the scale of their own
            magnitude. None keeps and gathers them in the precision of the run.

    Raises:
        ParallelPlanError: If a value has the wrong type or is out of its range, if ``history`` or
            ``margin`` is set for another recipe, if ``parameters`` is set for another recipe than
            tensorwise and delayed, or if a setting contradicts ``te_recipe``.
        UnsupportedError: If ``te_recipe`` has a setting without a counterpart here.

    Source: Micikevicius et al. 2022 (formats, delayed); DeepSeek-AI 2024 (https://arxiv.org/abs/2412.19437),
        section 3.3 (blockwise).
    """

    recipe: FP8Recipe = "tensorwise"
    format: Literal["hybrid", "e4m3"] | None = None
    first_bf16: Index = 0
    last_bf16: Index = 0
    keep: tuple[str, ...] = ()
    history: Count = _HISTORY
    margin: Annotated[int, Range(minimum=0, maximum=32)] = 0
    emulate: bool = False
    te_recipe: Any = None
    cast_weights: Literal["batch", "microbatch"] | None = None
    parameters: Literal["fp8"] | None = None

    def __post_init__(self) -> None:
        if self.te_recipe is not None:
            self._follow(_settings_of_recipe(self.te_recipe))
        coerce_fields(self, "fp8.")
        if self.recipe != "delayed" and (self.history, self.margin) != (_HISTORY, 0):
            raise ParallelPlanError(
                f"fp8.history ({self.history}) and fp8.margin ({self.margin}) need "
                f"recipe='delayed': {self.recipe} computes scales from the tensors themselves. "
                "Change the recipe, or leave them out."
            )
        if self.parameters is not None and not self.has_one_scale:
            raise ParallelPlanError(
                f"fp8.parameters ({self.parameters!r}) needs recipe='tensorwise' or 'delayed': it "
                f"is {self.recipe!r}. {_REASONS_AGAINST_STORAGE[self.recipe]} Change the recipe, "
                "or leave fp8.parameters out."
            )

    def _follow(self, settings: dict[str, Any]) -> None:
        """Take the settings of a recipe object; refuse others that were given beside it."""
        for name, value in settings.items():
            given = getattr(self, name)
            if given not in (value, type(self).__dataclass_fields__[name].default):
                raise ParallelPlanError(
                    f"fp8.{name} ({given!r}) contradicts fp8.te_recipe "
                    f"({type(self.te_recipe).__name__}), which says {value!r}. Leave one out."
                )
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, value: Any) -> FP8 | None:
        """Return the settings that a user gave in one of several forms; None without any.

        Args:
            value: The name of a recipe, a mapping of settings, or settings.

        Raises:
            ParallelPlanError: For any other value, and as for the class.
        """
        settings: FP8Recipe | FP8 | None = coerced("fp8", value, FP8Recipe | FP8 | None)
        return cls(settings) if isinstance(settings, str) else settings

    @property
    def gradient_format(self) -> Literal["e5m2", "e4m3"]:
        """Return the format of gradients of outputs."""
        is_hybrid = self.has_one_scale if self.format is None else self.format == "hybrid"
        return "e5m2" if is_hybrid else "e4m3"

    @property
    def has_one_scale(self) -> bool:
        """Return whether a tensor has one scale; its transpose then has the same numbers."""
        return self.recipe in _PER_TENSOR_RECIPES

    @property
    def multiple(self) -> int:
        """Return the number that tokens are padded to a multiple of (tokens)."""
        return {"blockwise": BLOCK, "mxfp8": _GROUP}.get(self.recipe, 16)

    def feature_multiple(self, backend: Backend = "native") -> int:
        """Return the number that features of a rank must be a multiple of (elements).

        Our products on GPUs read the scales of square blocks four at a time.
        """
        is_single = self.emulate or backend == "te" or self.recipe != "blockwise"
        return self.multiple if is_single else 4 * BLOCK

    def shares_casts(self, num_microbatches: int, graphs: GraphMode | None = None) -> bool:
        """Return whether the microbatches of a batch share the casts of weights."""
        if self.cast_weights is not None:
            return self.cast_weights == "batch"
        return num_microbatches > 1 and graphs != "segments"

    def includes(self, layer: int, num_layers: int, name: str) -> bool:
        """Return whether a linear layer computes in 8 bits."""
        is_inside = self.first_bf16 <= layer < num_layers - self.last_bf16
        return is_inside and not any(fnmatchcase(name, pattern) for pattern in self.keep)

    def check_sizes(
        self, name: str, out_features: int, in_features: int, backend: Backend = "native"
    ) -> None:
        """Refuse a linear layer whose sizes on a rank do not fit.

        Raises:
            ParallelPlanError: If they do not divide.
        """
        multiple = self.feature_multiple(backend)
        if out_features % multiple or in_features % multiple:
            raise ParallelPlanError(
                f"fp8 ({self.recipe}) needs sizes that are multiples of {multiple}: {name} "
                f"has {out_features} output and {in_features} input features on this rank. Name "
                f"it in fp8.keep, such as keep=[{name!r}], use "
                + ("another recipe, " if multiple > 16 else "")
                + "a smaller tp, or fp8=None."
            )


def check_fp8_products(
    settings: FP8 | None,
    overlap_tensor_parallel: bool,
    backend: Backend = "native",
    graphs: GraphMode | None = None,
    zero: int = 1,
) -> None:
    """Refuse products in 8 bits, or products of Transformer Engine, that do not exist.

    Args:
        settings: Settings of the products; None without products in 8 bits.
        zero: 1 if main parameters are divided over the data ranks, 0 if every rank has all.

    Raises:
        ParallelPlanError: If the products are to be cut into pieces or captured, if microbatches
            cannot share casts, if weights cannot be kept in 8 bits, or if the recipe or ``emulate``
            belongs to the other library.
    """
    if settings is not None and overlap_tensor_parallel and not settings.has_one_scale:
        raise ParallelPlanError(
            f"fp8 ({settings.recipe}) cannot be used with linear.overlap: scales of rows, "
            "columns and blocks depend on the gathered tensor, so its pieces cannot be cast before "
            "they are sent. Use the recipe tensorwise or delayed, or leave one of them out."
        )
    if settings is not None and settings.cast_weights == "batch":
        _check_shared_casts(backend, graphs)
    if settings is not None and settings.parameters is not None:
        _check_stored_weights(zero)
    if backend == "te":
        _check_engine(settings, overlap_tensor_parallel)
        return
    for name, is_used in (
        ("recipe 'mxfp8'", settings is not None and settings.recipe == "mxfp8"),
        ("te_recipe", settings is not None and settings.te_recipe is not None),
    ):
        if is_used:
            raise ParallelPlanError(
                f"fp8 with {name} needs linear.backend='te': only Transformer Engine implements "
                "it. Set linear.backend='te', or use the recipe tensorwise, delayed, rowwise or "
                "blockwise."
            )


def _check_shared_casts(backend: Backend, graphs: GraphMode | None) -> None:
    reason = None
    if backend == "te":
        reason = "linear.backend 'te', which casts weights for each product"
    elif graphs == "segments":
        reason = (
            "cuda_graphs in mode 'segments', whose graphs belong to single microbatches: a replay "
            "would not cast the weights that an update has changed"
        )
    if reason is not None:
        raise ParallelPlanError(
            f"fp8.cast_weights ('batch') cannot be used with {reason}. Use 'microbatch', or leave "
            "it out."
        )


def _check_stored_weights(zero: int) -> None:
    if zero == 0:
        raise ParallelPlanError(
            "fp8.parameters ('fp8') cannot be used with optimizer.zero=0, which gathers no "
            "parameters: every rank has all of them. Use 1, or leave fp8.parameters out."
        )


def _check_engine(settings: FP8 | None, overlap_tensor_parallel: bool) -> None:
    if overlap_tensor_parallel:
        raise ParallelPlanError(
            "linear.backend ('te') cannot be used with linear.overlap, because the overlapped "
            "products of pieces are those of this package. Leave one of them out."
        )
    if settings is None:
        return
    if settings.recipe == "rowwise":
        raise ParallelPlanError(
            "fp8.recipe with linear.backend='te' must be tensorwise, delayed, blockwise or mxfp8: "
            "it is 'rowwise', which Transformer Engine does not have. Change the recipe, or use "
            "linear.backend='native'."
        )
    if settings.emulate:
        raise ParallelPlanError(
            "fp8.emulate cannot be used with linear.backend='te': Transformer Engine computes only "
            "on GPUs. Leave emulate out, or use linear.backend='native'."
        )


def _settings_of_recipe(recipe: Any) -> dict[str, Any]:
    """Return the settings of a recipe of Transformer Engine, by the names of ``FP8``."""
    shown = type(recipe).__name__
    methods = [getattr(recipe, question, None) for question in _KINDS]
    if not all(callable(method) for method in methods):
        raise ParallelPlanError(
            f"fp8.te_recipe must be a recipe of Transformer Engine: {_NAMES}. It is of type "
            f"{shown}."
        )
    kinds = [
        name for name, method in zip(_KINDS.values(), methods, strict=True) if method and method()
    ]
    if not kinds:
        raise UnsupportedError(
            f"fp8.te_recipe cannot be {shown}: linear layers of this package support only "
            f"{_NAMES}. Use one of them."
        )
    settings = {"recipe": kinds[0], "format": _format(recipe)}
    for name in ("fp8_dpa", "fp8_mha", "backward_override"):
        if getattr(recipe, name, None):
            raise UnsupportedError(
                f"fp8.te_recipe ({shown}) cannot have {name}={getattr(recipe, name)!r}: only "
                "linear layers compute in 8 bits, and both of their passes do. Leave it out."
            )
    return settings | (_history(recipe) if kinds[0] == "delayed" else {})


def _format(recipe: Any) -> str:
    name = str(recipe.fp8_format.name).lower()
    if name not in ("hybrid", "e4m3"):
        raise UnsupportedError(
            f"fp8.te_recipe ({type(recipe).__name__}) must have the format HYBRID or E4M3: it is "
            f"{name.upper()}, with which inputs and weights would have 2 bits of mantissa. Use one "
            "of the two."
        )
    return name


def _history(recipe: Any) -> dict[str, int]:
    """Return the history of scales of earlier steps, which this package keeps itself."""
    legal = {
        "amax_compute_algo": ("max", "most_recent"),
        "scaling_factor_compute_algo": (None,),
        "reduce_amax": (True,),
    }
    for name, values in legal.items():
        value = getattr(recipe, name)
        if value not in values:
            raise UnsupportedError(
                f"fp8.te_recipe (DelayedScaling) cannot have {name}={value!r}: this package keeps "
                "the history itself, so that all ranks and checkpoints share it. Legal: "
                f"{' or '.join(map(repr, values))}."
            )
    is_last = recipe.amax_compute_algo == "most_recent"
    return {"history": 1 if is_last else recipe.amax_history_len, "margin": recipe.margin}
