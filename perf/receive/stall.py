"""One GPU: whether a policy as it is shipped ever stands still, keeps its gain, and lets go of what is stuck.

    python perf receive-stall --output stall.json                 # about 5 minutes; needs a CUDA GPU, torch and cupy
    python perf receive-stall --minutes 10 --connections 1        # the long run alone, streams on one hardware queue

First the long run: the emulated receiver of receive-residency on rank 0, vLLM as it is and rank-aware with the delay
that the package finds for this environment, in turns, for --minutes. In each turn no value may be wrong and no step may
take ten times the median. The gain is vLLM's step divided by the policy's; --gain is what it is held against, less a
tenth.

Then a staged stall: a step's activation never comes, for the peers wait for receives that this rank holds back. The
main stream spins until one of these has been posted. The watch has --stall-s seconds, and an eighth twice over, to post
them. Where streams share one hardware queue nothing that is posted may get past what is stuck: whether it does is
reported, and judged on queues of their own alone.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from output import write
from receive.emulated import ROWS, Handler
from receive.loads import LOADS, transformer
from receive.residency import Bench, lacks
from receive.residency_rows import Row
from verdict import Verdict

GATE = r"""
extern "C" __global__ void gate(const volatile int* flag, long long limit, int* gave_up)
{
    long long first, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(first));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (*flag == 0 && now - first < limit);
    if (*flag == 0) *gave_up = 1;
}
"""
GATE_LIMIT_S = 30.0
GAINS = {"1": 1.97}  # of decode on one hardware queue, as in perf/results/receive.md


def shipped_delay(pp: int, rank: int) -> int:
    """Return the rank-aware delay as far as the package allows it in this environment."""
    from trtllm_pp_progress.vllm.policy import delay_for
    from trtllm_pp_progress.vllm.settings import transport_here

    return min(delay_for(rank, pp), transport_here("cuda", 2, 8 * ROWS).longest_delay(rank, pp))


def long_run(options: argparse.Namespace) -> dict[str, Any]:
    """Run vLLM as it is and the policy in turns until the time is up."""
    delay = shipped_delay(options.pp, 0)
    bench = Bench(LOADS[options.load], SimpleNamespace(pp=options.pp, rank=0, ready=0.95, steps=options.steps))
    bench.delays = {"post-model": delay}
    rows: dict[str, list[Row]] = {"immediate": [], "post-model": []}
    ends = time.monotonic() + options.minutes * 60
    while time.monotonic() < ends or not rows["post-model"]:
        for arm, found in rows.items():
            if arm == "immediate" or delay:
                found.append(bench.run(arm, 1))
    steps = {arm: [row.step_ms for row in found] for arm, found in rows.items() if found}
    middle = {arm: statistics.median(found) for arm, found in steps.items()}
    failures = [f"{arm}: {row.wrong} wrong values" for arm, found in rows.items() for row in found if row.wrong]
    failures += [
        f"{arm}: a step of {max(found):.2f} ms, usual are {middle[arm]:.2f}"
        for arm, found in steps.items()
        if max(found) > 10 * middle[arm]
    ]
    gain = middle["immediate"] / middle["post-model"] if delay else 1.0
    if delay and options.gain and gain < 0.9 * options.gain:
        failures.append(f"gain {gain:.2f}, expected {options.gain:.2f}")
    turns = {arm: len(found) for arm, found in steps.items()}
    return {"delay": delay, "turns": turns, "step_ms": middle, "gain": gain, "failures": failures}


def staged_stall(options: argparse.Namespace) -> dict[str, Any]:
    """Let a rank stand still for want of what it holds back; return how long it took to get on."""
    import cupy
    import torch

    from trtllm_pp_progress.vllm import shape
    from trtllm_pp_progress.vllm.attachment import Attachment
    from trtllm_pp_progress.vllm.settings import load_settings

    pp, handler = options.pp, Handler(options.pp)
    model = transformer(LOADS[options.load])
    gate = cupy.RawModule(code=GATE).get_function("gate")
    flag, gave_up = (torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(2))
    held_from = 10**9  # the step from which on a receive that is posted sets the flag

    def broadcast(tokens: Any, src: int, group: Any) -> None:
        tokens.fill_(src)
        if src >= held_from:
            flag.fill_(1)

    facts = shape.Facts(pp, 0, "cuda", shape.RUNNER, False, shape.HANDLER, "nccl", "")
    shape.observe = lambda worker: facts  # type: ignore[assignment]
    live = SimpleNamespace(req_id_to_index={"request": 0})
    worker = SimpleNamespace(
        model_runner=SimpleNamespace(pp_handler=handler, req_states=live),
        execute_model=lambda output: None,
        compile_or_warm_up_model=lambda: None,
        shutdown=lambda: None,
    )
    stock, torch.distributed.broadcast = torch.distributed.broadcast, broadcast
    try:
        settings = load_settings(receive="rank-aware", stall_warning_s=options.stall_s, timing="off")
        attached = Attachment(worker, settings)
        worker.compile_or_warm_up_model()
        output = SimpleNamespace(total_num_scheduled_tokens=1, finished_req_ids=())
        for step in range(12):
            slot = handler.get_prev_sampled_outputs()
            worker.execute_model(output)
            if step == 11:  # what is held back by now is what the peers wait for
                held_from = step - attached.status()["held"] + 1
                torch.cuda.synchronize()
                with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
                    gate((1,), (1,), (flag.data_ptr(), int(GATE_LIMIT_S * 1e9), gave_up.data_ptr()))
            model()
            handler.receive()
            del slot
        since, past = time.monotonic(), torch.cuda.Event()
        past.record()
        while not past.query() and time.monotonic() - since < 2 * GATE_LIMIT_S:
            time.sleep(0.01)
        seconds = time.monotonic() - since
        torch.cuda.synchronize()
        found = attached.status()
        values = [int(slot.tokens[0]) == slot.step for slot in handler.queue if slot is not None]
        attached.detach()
    finally:
        torch.distributed.broadcast = stock
    unblocked = not int(gave_up)
    return {
        "seconds": round(seconds, 2), "limit_s": 1.25 * options.stall_s + 0.5, "unblocked": unblocked,
        "trouble": found["trouble"], "active": found["active"], "right": all(values),
    }  # fmt: skip


def judge(found: dict[str, Any], connections: str) -> Verdict:
    """Return what is wrong with one environment's runs."""
    failures, stall = list(found["long"]["failures"]), found["stall"]
    if stall is None:
        return Verdict(failures)
    if not stall["right"]:
        failures.append("staged stall: a result is not what was sent")
    if stall["active"] and stall["unblocked"]:
        failures.append("staged stall: the policy went on")
    if (not stall["unblocked"] or stall["seconds"] > stall["limit_s"]) and connections == "default":
        failures.append(f"staged stall: {stall['seconds']:.1f} s, at most {stall['limit_s']:.1f} are meant")
    return Verdict(failures)


def options_from(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Look for a stall on one GPU, and stage one.")
    parser.add_argument("--minutes", type=float, default=2.0, help="of the long run, for each kind of queue")
    parser.add_argument("--stall-s", type=float, default=2.0, help="after which a stall is one")
    parser.add_argument("--load", choices=sorted(LOADS), default="decode")
    parser.add_argument("--pp", type=int, default=4, help="stages of the emulated pipeline")
    parser.add_argument("--steps", type=int, default=40, help="of one turn")
    parser.add_argument("--gain", type=float, help="what the policy gains at least, less a tenth")
    parser.add_argument("--connections", choices=("default", "1", "both"), default="both",
                        help="CUDA_DEVICE_MAX_CONNECTIONS; each in a process of its own")  # fmt: skip
    parser.add_argument("--output", type=Path, help="where to write what was found as JSON")
    options = parser.parse_args(argv)
    if options.pp < 2 or options.minutes <= 0 or options.stall_s < 0.5 or options.steps < 2:
        parser.error("--pp and --steps at least 2, --minutes above 0, --stall-s at least 0.5")
    return options


def both(arguments: list[str], minutes: float) -> int:
    """Run each kind of queue in a process of its own, whose streams are made for it; return the worst exit status."""
    command = [sys.executable, str(Path(__file__).parents[1]), "receive-stall", *arguments]
    codes = []
    for connections in ("default", "1"):
        environ = {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_MAX_CONNECTIONS"}
        environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if connections == "1" else {}
        words = [*command, "--connections", connections]
        codes.append(subprocess.run(words, env=environ, timeout=minutes * 60 + 240, check=False).returncode)
    return max(codes)


def main(argv: list[str] | None = None) -> int:
    """Measure and print; return 0, 1 where something stood still, was wrong or was lost, 2 without a GPU."""
    arguments = sys.argv[1:] if argv is None else argv
    options = options_from(arguments)
    if lacking := lacks():
        print(f"receive-stall: needs {lacking}", file=sys.stderr)
        return 2
    import torch

    if options.connections == "both":
        return both(arguments, options.minutes)
    if options.connections == "1" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1":
        print("receive-stall: set CUDA_DEVICE_MAX_CONNECTIONS=1, or take --connections both", file=sys.stderr)
        return 2
    options.gain = options.gain or GAINS.get(options.connections)
    long = long_run(options)
    stall = staged_stall(options) if long["delay"] else None  # with nothing held back there is none to stage
    found = {"connections": options.connections, "long": long, "stall": stall}
    judged = judge(found, options.connections)
    environment = {name: os.environ[name] for name in sorted(os.environ) if name.startswith(("NCCL_", "CUDA_DEVICE"))}
    print(
        f"# {torch.cuda.get_device_name()}, torch {torch.__version__}, pp {options.pp}, {options.load}, {environment}"
    )
    print(f"long run: {found['long']}\nstaged stall: {found['stall']}")
    print("\n".join(f"# {line}" for line in judged.lines("nothing stood still")))
    if options.output:
        path = options.output.with_stem(f"{options.output.stem}-{options.connections}")
        write(path, device=torch.cuda.get_device_name(), torch=torch.__version__, environment=environment, **found)
    return judged.code


if __name__ == "__main__":
    raise SystemExit(main())
