"""The command line: one file a command, each a frozen dataclass of arguments and a `run`.

Bad input ends with one line on standard error and exit code 2. A command's module is imported when it is called.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from siamesenorm.cli.parsing import parse
from siamesenorm.errors import UserError, unknown

COMMANDS = {
    "demo": "compare Pre-Norm, Post-Norm, HybridNorm and SiameseNorm on the built-in corpus",
    "prepare": "turn text into memory-mapped tokens",
    "train": "train one language model, or go on with it",
    "sweep": "train a grid of topologies, norms, learning rates and seeds",
    "reproduce": "run an experiment of the recipes and report on it",
    "report": "make tables, figures and a page of a sweep",
    "verdict": "classify loss curves: stable, spiked, diverged or not learned",
    "calibrate": "measure how often the verdict is wrong, on runs known to be safe",
    "rewire": "give an existing model in a local directory another residual topology",
    "export": "write a trained model for Hugging Face, or an exported one in the native format",
    "generate": "continue a text with a trained, exported or rewired model",
    "explain": "show formula, diagram, cost and special cases of a topology",
    "bench": "measure speed and memory of boundaries, training steps, and other libraries",
    "sizes": "count parameters and FLOPs of every size",
}
LABORATORY = {"numpy", "tyro", "rich", "matplotlib", "tokenizers", "safetensors"}


BROKEN_PIPE = 141  # as a shell tells it: 128 and the number of SIGPIPE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 2 for bad input, 130 when interrupted, 141 when nobody reads on."""
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # What is still in the buffer would be told as an error at the end of the process.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _run(arguments: Sequence[str] | None) -> int:
    name, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        if name in ("-h", "--help"):
            print(usage())
            return 0
        if name == "--version":
            from siamesenorm import __version__

            print(__version__)
            return 0
        if name not in COMMANDS:
            raise unknown("command", name, COMMANDS)
        command = importlib.import_module(f"siamesenorm.cli.{name}")
        command.run(parse(command.Arguments, rest, name))
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
    except KeyboardInterrupt:
        print("siamesenorm: interrupted; repeat the command to go on", file=sys.stderr)
        return 130
    return 0


def usage() -> str:
    """Return the list of commands."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: siamesenorm COMMAND [OPTIONS]",
            "",
            "Where and how should a Transformer normalise its residual path?",
            "",
            *lines,
            "",
            "siamesenorm COMMAND --help shows a command's options.",
        ]
    )
