"""The case id of upstream's performance tests: read, checked, scaled, and written again."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

__all__ = ["FORM", "PUBLISHED", "Case", "CaseError", "parse", "scaled"]

PUBLISHED = (
    "qwen3_0.6b-bench-pytorch-bfloat16-maxbs:512-maxnt:2048-input_output_len:8000,1000-reqs:256-con:1-pp:4-gpus:4"
)
FORM = "MODEL-bench-pytorch-DTYPE-maxbs:N-maxnt:N-input_output_len:IN,OUT-reqs:N-con:N-pp:N-gpus:N"
MODELS = ("qwen3_0.6b",)
DTYPES = ("bfloat16", "float16", "float32")


class CaseError(ValueError):
    """A case id cannot be used; the message is one line and names the bad part and the valid form."""


@dataclass(frozen=True)
class Case:
    """One case. Lengths are in tokens; `max_batch` and `max_tokens` are the engine's limits for one batch."""

    model: str
    dtype: str
    max_batch: int
    max_tokens: int
    input_len: int
    output_len: int
    requests: int
    concurrency: int
    pp: int
    gpus: int

    @property
    def id(self) -> str:
        """The id this case is written as."""
        return (
            f"{self.model}-bench-pytorch-{self.dtype}-maxbs:{self.max_batch}-maxnt:{self.max_tokens}"
            f"-input_output_len:{self.input_len},{self.output_len}-reqs:{self.requests}-con:{self.concurrency}"
            f"-pp:{self.pp}-gpus:{self.gpus}"
        )


def parse(text: str) -> Case:
    """Read an id, with or without `test_perf[...]` around it; raises CaseError."""
    inner = re.fullmatch(r"(?:test_perf)?\[(.*)\]", text.strip())
    parts = (inner.group(1) if inner else text.strip()).split("-")
    names = [part.partition(":")[0] for part in FORM.split("-")]
    if len(parts) != len(names):
        raise CaseError(f"case {text!r} has {len(parts)} parts instead of {len(names)}: the form is {FORM}")
    given = dict(zip(names, parts, strict=True))

    def refuse(part: str, valid: str) -> CaseError:
        return CaseError(f"part {part!r} of case {text!r} is not valid: {valid}; the form is {FORM}")

    def word(name: str, valid: tuple[str, ...]) -> str:
        if given[name] not in valid:
            raise refuse(given[name], f"expected {' or '.join(valid)}")
        return given[name]

    def numbers(name: str, count: int) -> list[int]:
        key, _, value = given[name].partition(":")
        fields = value.split(",")
        if key != name or len(fields) != count or not all(re.fullmatch(r"[1-9]\d{0,8}", f) for f in fields):
            raise refuse(given[name], f"expected {name}:{','.join('N' * count)} with whole numbers from 1")
        return [int(field) for field in fields]

    word("bench", ("bench",))
    word("pytorch", ("pytorch",))
    input_len, output_len = numbers("input_output_len", 2)
    single: Callable[[str], int] = lambda name: numbers(name, 1)[0]  # noqa: E731
    case = Case(
        word("MODEL", MODELS), word("DTYPE", DTYPES), single("maxbs"), single("maxnt"), input_len, output_len,
        single("reqs"), single("con"), single("pp"), single("gpus"),
    )  # fmt: skip
    if case.pp < 2:
        raise refuse(given["pp"], "a pipeline has at least 2 stages")
    if case.gpus % case.pp:
        raise refuse(given["gpus"], f"expected a multiple of pp:{case.pp}")
    if case.gpus != case.pp:
        raise refuse(given["gpus"], f"tensor parallelism is not run: expected gpus:{case.pp}")
    return case


def scaled(
    case: Case, scale: float = 1.0, requests: int | None = None, output: int | None = None
) -> tuple[Case, list[str]]:
    """Return the case as it is run and, in words, what was reduced; CaseError for a scale outside (0, 1].

    `scale` shortens the prompt; `requests` and `output` replace their parts and may not exceed them.
    """
    if not 0 < scale <= 1:
        raise CaseError(f"scale {scale:g} is not valid: more than 0, at most 1")
    for name, given, most in (("requests", requests, case.requests), ("output", output, case.output_len)):
        if given is not None and not 1 <= given <= most:
            raise CaseError(f"{name} {given} is not valid: 1 to {most}, as the case has it")
    run = replace(
        case,
        input_len=max(1, round(case.input_len * scale)),
        output_len=output or case.output_len,
        requests=requests or case.requests,
    )
    run = replace(run, concurrency=min(run.concurrency, run.requests))
    pairs = {
        "input": (case.input_len, run.input_len),
        "output": (case.output_len, run.output_len),
        "requests": (case.requests, run.requests),
        "concurrency": (case.concurrency, run.concurrency),
    }
    return run, [f"{name} {now} instead of {was}" for name, (was, now) in pairs.items() if was != now]
