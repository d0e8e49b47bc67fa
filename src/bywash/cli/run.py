"""`bywash run`: a Hugging Face MoE model with its experts spread over ranks."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from bywash.cli.units import parse_link
from bywash.errors import BywashError, ConfigError

if TYPE_CHECKING:
    from bywash.exchange import Combine
    from bywash.models.job import JobOptions, RankResult

DEFAULT_MODEL = "bywash-tiny"
DEFAULT_RANKS = 4
DEFAULT_TOKENS = 48
RANKS_HELP = "Local processes to start [default: 4; under torchrun its world size]."
DEFAULT_PROMPTS = (
    "An error is raised if the file",
    "If the name is not found in the table,",
    'def load_text(path):\n    with open("',
    "if not isinstance(label, str):\n    raise ",
    "| 12 | function | close | self | Close the ",
    "| U+2191 | \u2191 | So | UPWARDS ",
    "A small class that implements the",
    "The cache is cleared when the",
)
"""In the style of what the shipped model was trained on: prose, code and tables of Python's documentation."""


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What the user asked for, before names are resolved and prompts tokenised. Fields are named as options."""

    model: str = DEFAULT_MODEL
    ranks: int | None = None
    prompt: tuple[str, ...] = DEFAULT_PROMPTS
    prompt_ids: tuple[tuple[int, ...], ...] = ()
    tokens: int = DEFAULT_TOKENS
    micro_batch: int = 2
    exchange: str = "auto"
    combine: "Combine" = "exact"
    link: str = ""
    latency: str = ""
    dtype: str = "float32"
    speeds: tuple[int, ...] = ()
    check: bool = False
    trace: str | None = None
    topic: tuple[str, ...] = ()
    json: str | None = None
    deadline: float = 60.0


def run(
    model: str = typer.Option(
        DEFAULT_MODEL, help="Checkpoint directory (config.json + safetensors), or a name (docs/run.md)."
    ),
    ranks: int | None = typer.Option(None, help=RANKS_HELP),
    prompt: list[str] = typer.Option([], help="Prompt text; repeat for several [default: 8 built-in ones]."),
    prompt_ids: list[str] = typer.Option([], help="Prompt as token ids, '1,2,3'; repeat for several."),
    prompts: str = typer.Option("", help="File of prompts: a JSON object with 'prompt' and 'topic' on each line."),
    tokens: int = typer.Option(DEFAULT_TOKENS, help="Tokens to generate for each prompt."),
    micro_batch: int = typer.Option(2, help="Prompts computed together; equal values give bitwise equal results."),
    exchange: str = typer.Option("auto", help="How rows move: shm (ranks of one host), gloo (sockets), or auto."),
    combine: str = typer.Option("exact", help="exact: same bits on any number of ranks; stable, fast: fewer bytes."),
    link: str = typer.Option("", help="Emulate a link of this rate between ranks, such as 200Gbps (shm)."),
    latency: str = typer.Option("", help="Latency of the emulated link, such as 5us."),
    dtype: str = typer.Option("float32", help="float32, bfloat16 or float16."),
    speeds: str = typer.Option("", help="Relative speed of each rank, '2,1,1': experts are shared out in proportion."),
    check: bool = typer.Option(False, "--check", help="Compare with one process; exit 1 if it differs."),
    trace: str | None = typer.Option(None, help="Record the routing to this file (.npz)."),
    topic: list[str] = typer.Option([], help="Label of each prompt in the trace, in order."),
    json_file: str | None = typer.Option(None, "--json", help="Write the results to this file."),
    deadline: float = typer.Option(60.0, help="Seconds any wait on another rank may take."),
) -> None:
    """Run a MoE model with its experts spread over processes, and report what moved."""
    texts, topics = read_prompts(prompts) if prompts else ((), ())
    start_run(
        RunRequest(
            model=model,
            ranks=ranks,
            prompt=(*prompt, *texts) or (() if prompt_ids else DEFAULT_PROMPTS),
            prompt_ids=tuple(_numbers(ids, "--prompt-ids") for ids in prompt_ids),
            tokens=tokens,
            micro_batch=micro_batch,
            exchange=exchange,
            combine=combine,  # type: ignore[arg-type]
            link=link,
            latency=latency,
            dtype=dtype,
            speeds=_numbers(speeds, "--speeds") if speeds else (),
            check=check,
            trace=trace,
            topic=(*topic, *topics),
            json=json_file,
            deadline=deadline,
        )
    )


def start_run(request: RunRequest) -> None:
    """Refuse what cannot work, then start the ranks, or be one under torchrun."""
    from bywash.launch import run_local, run_under_torchrun, under_torchrun

    _check_request(request)
    if under_torchrun():
        run_under_torchrun(rank_main, request, request.ranks, request.deadline)
    else:
        run_local(rank_main, request, DEFAULT_RANKS if request.ranks is None else request.ranks, request.deadline)


def rank_main(request: RunRequest, rank: int, ranks: int, store: Any) -> None:
    """What each rank does; rank 0 also reports. Raises `BywashError`."""
    from bywash.cli.console import RunConsole
    from bywash.exchange.group import Group, gather_objects
    from bywash.models.job import run_job

    options = _job_options(request)  # before joining: transformers writes presets on rank 0 alone once a group exists
    group = Group(rank=rank, ranks=ranks, store=store, deadline_s=request.deadline)
    try:
        with RunConsole(quiet=rank != 0) as console:
            result = run_job(options, group if ranks > 1 else None, console)
            results = gather_objects(group, result)
            if results is not None:
                _report(request, options, results, console)
    finally:
        group.close()


def _check_request(request: RunRequest) -> None:
    """What can be refused before anything is started."""
    from bywash.exchange import COMBINES, EXCHANGES

    choices = {"exchange": EXCHANGES, "combine": COMBINES, "dtype": ("float32", "bfloat16", "float16")}
    for name, known in choices.items():
        if getattr(request, name) not in known:
            raise ConfigError(f"--{name} {getattr(request, name)}: choose one of {', '.join(known)}")
    for name in ("tokens", "micro_batch"):
        if getattr(request, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(request, name)}: must be at least 1")
    if request.deadline <= 0:
        raise ConfigError(f"--deadline {request.deadline:g}: must be more than 0 seconds")
    parse_link(request.link, request.latency)
    prompts = len(request.prompt) + len(request.prompt_ids)
    if request.topic and len(request.topic) != prompts:
        raise ConfigError(f"--topic is given {len(request.topic)} times for {prompts} prompts: label each or none")
    for name in ("json", "trace"):
        path = getattr(request, name)
        if path and not Path(path).resolve().parent.is_dir():
            raise ConfigError(f"--{name} {path}: its directory does not exist")


def read_prompts(file: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(prompts, topics) of a JSON-lines file; topics are empty unless every line has one."""
    try:
        lines = [json.loads(line) for line in Path(file).read_text().splitlines() if line.strip()]
        prompts = tuple(str(line["prompt"]) for line in lines)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f'--prompts {file}: must be a file with an object like {{"prompt": "...", "topic": "..."}} on each line '
            f"({error!r})"
        ) from error
    topics = tuple(str(line["topic"]) for line in lines if "topic" in line)
    return prompts, topics if len(topics) == len(prompts) else ()


def _numbers(text: str, flag: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{flag} {text!r}: must be whole numbers with commas, for example 3,1,4") from None


def _job_options(request: RunRequest) -> "JobOptions":
    """Resolve names, tokenise, check against the model."""
    from bywash.models.job import JobOptions
    from bywash.models.loader import read_config
    from bywash.models.presets import model_directory
    from bywash.models.text import check_ids, text_for

    directory = model_directory(request.model)
    config = read_config(directory)
    prompts = list(request.prompt_ids)
    if request.prompt:
        text = text_for(directory, config.vocab_size)
        prompts = [tuple(text.encode(p)) for p in request.prompt] + prompts
    check_ids(prompts, config.vocab_size)
    longest, positions = max(len(p) for p in prompts) + request.tokens, config.max_position_embeddings
    if longest > positions:
        raise ConfigError(
            f"--tokens {request.tokens}: the longest prompt and its new tokens need {longest} positions, the model has "
            f"{positions}"
        )
    stop = config.eos_token_id
    return JobOptions(
        directory=str(directory),
        prompts=tuple(prompts),
        new_tokens=request.tokens,
        micro_batch=request.micro_batch,
        exchange=request.exchange,
        combine=request.combine,
        link=parse_link(request.link, request.latency),
        dtype=request.dtype,
        speeds=request.speeds,
        stop_ids=tuple(stop) if isinstance(stop, list) else () if stop is None else (stop,),
        deadline_s=request.deadline,
        check=request.check,
        trace=request.trace is not None,
        topics=request.topic,
    )


def _report(request: RunRequest, options: "JobOptions", results: list["RankResult"], console: Any) -> None:
    """Rank 0: check, write the files, print the summary; raise if the check failed."""
    from bywash.cli.summary import print_summary, result_json
    from bywash.models.check import check_run
    from bywash.routing import merge_traces

    tokens = {p: ids for r in results for p, ids in r.generation.tokens.items()}
    report = None
    if options.check:
        console.phase("checking against one process and against transformers")
        logits = {p: part for r in results for p, part in r.generation.prefill_logits.items()}
        report = check_run(options, tokens, logits, sum(r.router_mismatches or 0 for r in results))
    console.close()
    traces = [r.trace for r in results if r.trace is not None]
    if request.trace:
        merge_traces(traces).save(request.trace)
    outcome = result_json(request.model, options, results, tokens, report)
    if request.json:
        Path(request.json).write_text(json.dumps(outcome, indent=2) + "\n")
    print_summary(options, results, tokens, outcome)
    failures = report.failures(options.combine, options.dtype) if report else []
    if failures:
        raise BywashError("the check failed: " + "; ".join(failures))
