"""LightningCLI with OmegaConf interpolation that is resolved after all overrides."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import SUPPRESS, Namespace, set_parsing_settings
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from typing_extensions import override

from lightning_megatron.errors import CorruptDataError, ParallelPlanError, UnsupportedError
from lightning_megatron.option_errors import OptionParser, underscored
from lightning_megatron.recipe_files import with_recipe_paths
from lightning_megatron.strategy.megatron_strategy import MegatronStrategy
from lightning_megatron.strategy.private.data_loading import RecipeCLI
from lightning_megatron.strategy.private.processes import without_noise


def named_class(arguments: Sequence[str], key: str) -> str | None:
    """Return the class path that the last file or option gives for a key; None without any.

    A class that cannot be imported also gives None.

    Args:
        arguments: Command-line arguments, with names of recipes resolved to paths.
        key: Name of the setting: ``model`` or ``data``.
    """
    class_path = None
    for option, value in _options(arguments):
        if option in ("-c", "--config"):
            class_path = _class_in(value, key) or class_path
        elif option in (f"--{key}", f"--{key}.class_path"):
            class_path = value
    return class_path if class_path is not None and _exists(class_path) else None


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    for number, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if equals:
            yield option, value
        elif number + 1 < len(arguments):
            yield argument, arguments[number + 1]


def _class_in(path: str, key: str) -> str | None:
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        # The parser reads the file again and reports the error.
        return None
    entry = content.get(key) if isinstance(content, dict) else None
    chosen = entry.get("class_path") if isinstance(entry, dict) else entry
    return chosen if isinstance(chosen, str) else None


def _exists(path: str) -> bool:
    module, _, name = path.rpartition(".")
    try:
        return hasattr(import_module(module), name)
    except (ImportError, ValueError):
        # The parser reports the missing class.
        return False


def vocab_size_of(data: str, tokenizer: str) -> int:
    """Return the vocabulary size of a tokenizer (tokens).

    Recipes write ``${vocab_size_of:${data.class_path},${data.init_args.tokenizer}}``.

    Args:
        data: Class path of the data module that has the tokenizer.
        tokenizer: Name or path of the tokenizer.
    """
    module, _, name = data.rpartition(".")
    size: int = getattr(import_module(module), name).vocab_size_of(tokenizer)
    return size


_STRATEGY_PATHS = (
    "lightning_megatron.MegatronStrategy",
    f"{MegatronStrategy.__module__}.MegatronStrategy",
)


_EXAMPLES = """
examples:
  {command} -c recipe:gpt_speeches_cpu --trainer.max_steps 100
  {command} -c my_recipe.yaml --model my_package.MyModule --data my_package.MyDataModule
settings of a class, such as those of the strategy, of the default model and of the default data:
  {command} --trainer.strategy.help lightning_megatron.MegatronStrategy
  {command} --model.help lightning_megatron.CausalLM
  {command} --data.help lightning_megatron.TokenDataModule
"""


#: What prints the lines of ``fit --json``.
_JSON_BAR = "lightning_megatron.TokensProgressBar"


class _RecipeParser(OptionParser, LightningArgumentParser):
    """Parser of the Trainer's commands."""

    more = ". Recipes: lightning-megatron recipes"

    @override
    def format_help(self, *args: Any) -> str:
        if " [options] " not in self.prog:
            return super().format_help(*args)
        command = self.prog.replace(" [options]", "")
        self.usage = f"{command} -c RECIPE [options]"
        return super().format_help(*args) + _EXAMPLES.format(command=command)


class MegatronCLI(RecipeCLI):
    """Run a Trainer from YAML recipes and options; interpolation follows the merge of all of them.

    The class differs from ``LightningCLI`` in six settings:

    * ``${...}`` is resolved after all files and command-line options are merged, so that an option
      changes every value that refers to it. A path such as ``${trainer.devices}`` has the same
      meaning in a recipe and under a subcommand. ``${vocab_size_of:...}`` counts the tokens of a
      tokenizer.
    * A model or data module that the user names has the defaults of its class, and none of the
      defaults of the default class.
    * ``-c recipe:NAME`` reads a recipe that comes with the package.
    * The module creates its optimizers, because they need the parameters that ``configure_model``
      creates.
    * The file at ``--ckpt_path`` changes no setting.
    * A second run may overwrite the saved ``config.yaml``.

    Args:
        model_class: Base class of the model. A class path may name any subclass; the default is
            ``CausalLM``.
        datamodule_class: Base class of the data module. A class path may name any subclass; the
            default is ``TokenDataModule``.
        options: Further arguments of ``LightningCLI``.
    """

    def __init__(
        self,
        model_class: type[LightningModule] = LightningModule,
        datamodule_class: type[LightningDataModule] = LightningDataModule,
        **options: Any,
    ) -> None:
        set_parsing_settings(omegaconf_absolute_to_relative_paths=True)
        # Its name before omegaconf 2.4.
        register = getattr(OmegaConf, "register_resolver", OmegaConf.register_new_resolver)
        register("vocab_size_of", vocab_size_of, replace=True)
        defaults: dict[str, Any] = {
            "subclass_mode_model": True,
            "subclass_mode_data": True,
            "auto_configure_optimizers": False,
            "save_config_kwargs": {"overwrite": True},
            "parser_class": _RecipeParser,
        }
        given = options.pop("parser_kwargs", {})
        defaults["parser_kwargs"] = {"parser_mode": "omegaconf+"} | given
        self._parsers: list[LightningArgumentParser] = []
        super().__init__(model_class, datamodule_class, **(defaults | options))

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        self._parsers.append(parser)
        # The key of a file that changes another recipe, which `with_recipe_paths` has put before.
        parser.add_argument("--recipe", type=str, default=SUPPRESS, help=SUPPRESS)
        if len(self._parsers) == 1:
            # That of fit.
            parser.add_argument(
                "--json",
                action="store_true",
                default=SUPPRESS,
                help="Print an object of JSON for each logged step, in place of a bar or lines.",
            )
        if self.model_class is LightningModule:
            parser.set_defaults({"model": {"class_path": "lightning_megatron.CausalLM"}})
        if self.datamodule_class is LightningDataModule:
            parser.set_defaults({"data": {"class_path": "lightning_megatron.TokenDataModule"}})

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        if isinstance(args, (dict, Namespace)):
            super().parse_arguments(parser, args)
            return
        # Every rank has the command line of the first one, and resolves names of recipes itself.
        arguments = list(sys.argv[1:] if args is None else args)
        try:
            resolved = with_recipe_paths(list(map(underscored, arguments)))
        except (CorruptDataError, UnsupportedError) as error:
            parser.error(str(error))
        # Otherwise the chosen class would inherit the default values of the default class, such as
        # its seq_length, for every argument that both classes have.
        bases = {
            "model": self.model_class is LightningModule,
            "data": self.datamodule_class is LightningDataModule,
        }
        for key, has_default in bases.items():
            chosen = named_class(resolved, key)
            if has_default and chosen is not None:
                for known_parser in self._parsers:
                    known_parser.set_defaults({key: {"class_path": chosen}})
        try:
            if resolved == arguments:
                super().parse_arguments(parser, args)
            else:
                self.config = parser.parse_args(resolved)
        except OmegaConfBaseException as error:
            told = str(error).partition(" raised while resolving interpolation: ")[2]
            if told:
                # What a tokenizer is refused for; the last two lines are OmegaConf's.
                raise UnsupportedError(told.rpartition("\n    full_key: ")[0]) from error
            key = str(error.full_key).partition(".")[2]
            option = key.replace("init_args.", "")
            parser.error(
                f"{key}: {str(error).splitlines()[0]}. Correct the ${{...}} in its value, or give "
                f"another one: --{option} VALUE"
            )

    @override
    def before_instantiate_classes(self) -> None:
        # If a setting accepts several types, the parser's error describes only the first type. The
        # strategy's own error is more useful, so the strategy is constructed once before.
        settings = self.config if self.subcommand is None else self.config[self.subcommand]
        if settings.get("json"):
            callbacks = settings["trainer"].get("callbacks") or []
            others = callbacks if isinstance(callbacks, list) else [callbacks]
            bar = Namespace(class_path=_JSON_BAR, init_args=Namespace(refresh_rate=10, json=True))
            others = [one for one in others if not one.class_path.endswith("ProgressBar")]
            settings["trainer"]["callbacks"] = [bar, *others]
        chosen = settings["trainer"].get("strategy")
        if isinstance(chosen, Namespace) and chosen.class_path in _STRATEGY_PATHS:
            try:
                MegatronStrategy(**chosen.init_args.as_dict())
            except ValueError as error:
                raise ValueError(f"trainer.strategy: {error}") from error

    @override
    def instantiate_trainer(self, **options: Any) -> Trainer:
        try:
            with without_noise():
                return super().instantiate_trainer(**options)
        except (ParallelPlanError, UnsupportedError):
            raise
        except (ValueError, MisconfigurationException) as error:
            # What Lightning refuses is about the user's settings, too.
            raise UnsupportedError(f"trainer: {error}") from error


def main(args: list[str] | None = None) -> None:
    """Run a subcommand of the Trainer: fit, validate, test or predict.

    Args:
        args: Arguments, starting with the subcommand. None means the arguments of this process,
            with which the launcher also starts the other ranks.
    """
    MegatronCLI(args=args, parser_kwargs={"prog": "lightning-megatron"})
