"""The command line: one file per command, each a frozen dataclass of arguments and a `run`.

Bad input ends with one line on standard error and exit code 2. A command's module is imported when it is called.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from siamesenorm.cli.parsing import HELP, check_preset, parse
from siamesenorm.errors import UserError, unknown
from siamesenorm.files import ACCESS_REMEDY
from siamesenorm.training.presets import PRESETS

COMMANDS = {
    "demo": "compare Pre-Norm, Post-Norm and SiameseNorm in minutes, on built-in text or images",
    "prepare": "turn text into memory-mapped tokens",
    "train": "train one model, or resume it where it stopped",
    "sweep": "train a grid of topologies, norms, learning rates and seeds, and report on it",
    "reproduce": "run an experiment of the recipes and report on it",
    "runs": "list runs: directory, method, learning rate, seed, verdict, step",
    "report": "make tables, figures and a page of an experiment",
    "verdict": "classify loss curves as stable, spiked, diverged or not learned",
    "evaluate": "evaluate a trained run or any language model: held-out metrics, tasks, perplexity, features of images",
    "analyze": "analyse trained models: streams, depth, logit lens, outliers, rounding, Jacobians",
    "calibrate": "measure how often the verdict is wrong on given runs",
    "rewire": "give an existing model in a local directory another residual topology",
    "export": "write a trained model for Hugging Face",
    "generate": "continue a text with a trained, exported or rewired model",
    "sample": "draw images from a run of a diffusion model",
    "explain": "show formula, diagram, cost and special cases of a topology, or a norm",
    "bench": "measure speed and memory of boundaries, norms and training steps",
    "sizes": "count parameters and FLOPs of every size",
}
PRESET_COMMANDS = ("train", "sweep")
LABORATORY = {"numpy", "tyro", "rich", "matplotlib", "tokenizers", "safetensors", "scipy", "sklearn"}
BROKEN_PIPE = 141  # as shells report it: 128 and the number of SIGPIPE
INTERRUPTED = 130  # by SIGINT; a run that trains leaves with 143 after SIGTERM


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code.

    0, 2 for bad input, 130 when interrupted, 143 after SIGTERM while a run trains, 141 for a closed output.
    """
    try:
        code = _run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Otherwise the rest of the buffer would raise once more at the end of the process.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _run(arguments: list[str]) -> int:
    name, *rest = arguments or ["--help"]
    try:
        if name in HELP:
            print(usage())
        elif name == "--version":
            from siamesenorm import __version__

            print(__version__)
        elif name not in COMMANDS:
            raise unknown("command", name, COMMANDS)
        elif name in PRESET_COMMANDS and rest[:1] and rest[0] in HELP:
            print(preset_usage(name))
        else:
            if name in PRESET_COMMANDS:
                check_preset(rest)
            command = importlib.import_module(f"siamesenorm.cli.{name}")
            command.run(parse(command.Arguments, rest, f"{name} {rest[0]}" if name in PRESET_COMMANDS else name))
    except SystemExit as exit:  # help was shown
        return int(exit.code or 0)
    except ModuleNotFoundError as error:
        if error.name not in LABORATORY:
            raise
        print(f"siamesenorm: {error.name} is not installed: pip install 'siamesenorm[lab]'", file=sys.stderr)
        return 2
    except UserError as error:
        print(f"siamesenorm: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.filename is None:
            raise
        reason = (error.strerror or "cannot be read").lower()
        print(f"siamesenorm: {error.filename}: {reason}: {ACCESS_REMEDY}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stopped:
        print("siamesenorm: interrupted; repeat the command to resume", file=sys.stderr)
        return getattr(stopped, "exit_code", INTERRUPTED)
    return 0


def usage() -> str:
    """Return the list of commands."""
    question = "Where and how should a Transformer normalise its residual path?"
    return _page("COMMAND", question, COMMANDS, "siamesenorm COMMAND --help shows a command's options.")


def preset_usage(command: str) -> str:
    """Return the help of a command that starts from a preset, which takes no import of torch."""
    what = COMMANDS[command]
    sentence = f"{what[0].upper()}{what[1:]}. Every field of the preset can be overridden."
    hint = f"siamesenorm {command} mini --help shows the options, with the values of that preset."
    return _page(f"{command} PRESET", sentence, {name: preset.summary for name, preset in PRESETS.items()}, hint)


def _page(words: str, sentence: str, rows: dict[str, str], hint: str) -> str:
    width = max(map(len, rows))
    table = "\n".join(f"  {name:<{width}}  {what}" for name, what in rows.items())
    return f"usage: siamesenorm {words} [OPTIONS]\n\n{sentence}\n\n{table}\n\n{hint}"
