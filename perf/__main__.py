"""What can be measured from a checkout: `python perf` lists it, `python perf COMMAND ...` does it.

Started so, imports begin in this folder: `case`, `decoder`, `hosts`, `receive`, `relay` and `soak` are packages of it.
"""

from __future__ import annotations

import importlib
import sys

COMMANDS = {  # by name: the module, and the question it answers
    "sweep": ("relay.sweep", "why 256 polls: throughput by budget, interval and payload"),
    "hop": ("relay.hop", "where the time of one hop of the ring goes"),
    "growth": ("hosts.growth", "how a step grows with the number of ranks, from results of the bench"),
    "faults": ("hosts.faults", "what becomes of the ring when something happens between its hosts"),
    "soak": ("soak.command", "whether anything hangs, is wrong or is left behind in thousands of lives"),
    "pictures": ("case.pictures", "what a step looked like, from a result of perf/test_perf.py"),
    "decoder": ("decoder.selfcheck", "whether a model cut into stages gives the tokens of the whole one"),
    "receive-residency": ("receive.residency", "vLLM, one GPU: what a resident receive costs the model beside it"),
    "receive-stall": ("receive.stall", "vLLM, one GPU: whether a policy ever stands still, and lets go of what does"),
    "receive-nccl": ("receive.nccl", "vLLM, several GPUs: the real handler over NCCL, at each delay"),
    "receive-overhead": ("receive.overhead", "vLLM: host time that a policy adds to a step"),
    "receive-model": ("receive.model", "vLLM: a model on paper of when to post, for 2 to 16 stages"),
    "receive-trace": ("receive.trace", "vLLM: what a trace shows around its receives"),
    "receive-ab": ("receive.ab", "vLLM: its own benchmark with each policy, on your machines"),
}


def listing() -> str:
    """Return one line a command."""
    return "\n".join(f"  {name:18} {question}" for name, (_, question) in COMMANDS.items())


def main() -> None:
    """Run the command that was named; exit code 2 where there is none of that name."""
    name, arguments = (sys.argv[1:2] or ["--help"])[0], sys.argv[2:]
    if name in ("-h", "--help"):
        print(f"usage: python perf COMMAND [OPTIONS]\n\n{listing()}")
        return
    if name not in COMMANDS:
        print(f"Error: unknown command {name!r}: valid ones are {', '.join(COMMANDS)}", file=sys.stderr)
        raise SystemExit(2)
    raise SystemExit(importlib.import_module(COMMANDS[name][0]).main(arguments))


if __name__ == "__main__":
    main()
