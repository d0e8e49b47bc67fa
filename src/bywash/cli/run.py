"""`bywash run`: a Hugging Face MoE model with its experts spread over ranks."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import typer

from bywash.cli.limits import ALPHA_HELP, DEFAULT_ALPHA, check_deadline, check_link
from bywash.cli.output import STDOUT, apart, printing, replaceable, writable, write_json
from bywash.cli.units import parse_link
from bywash.errors import BywashError, ConfigError

if TYPE_CHECKING:
    from bywash.exchange import Combine
    from bywash.models.job import JobOptions, RankResult
    from bywash.models.overflow import OverflowOptions

DEFAULT_MODEL = "bywash-tiny"
DEFAULT_RANKS = 4
DEFAULT_TOKENS = 48
_MOST_SLOTS = 4096
RANKS_HELP = "Local processes to start (default: 4; under torchrun its world size)."
SLOTS_HELP = "Room on each rank for weights of other ranks' experts, so that rows may leave a busy home."
CAPACITY_HELP = "Most rows of an expert at once, times the mean in prefill; the rest waits or leaves. 0: no cap."
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

Prompt: TypeAlias = tuple[str | tuple[int, ...], str | None]
"""A prompt, as text or as token ids, and its topic."""


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What the user asked for, before names are resolved and prompts tokenised. Fields are named as options."""

    model: str = DEFAULT_MODEL
    ranks: int | None = None
    prompts: tuple[Prompt, ...]
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
    json: str | None = None
    deadline: float = 60.0
    overlap: str = "off"
    node_schedule: str = "together"
    timeline: str | None = None
    slots: int = 0
    capacity_factor: float = 0.0
    alpha: float | None = None
    break_even: int | None = None
    plan: str | None = None
    home: tuple[int, ...] = ()


def run(
    context: typer.Context,
    model: str = typer.Option(
        DEFAULT_MODEL, help="Checkpoint directory (config.json + safetensors), or a name (docs/run.md)."
    ),
    ranks: int | None = typer.Option(None, help=RANKS_HELP),
    prompt: list[str] = typer.Option([], help="Prompt text; repeat for several (default: 8 built-in ones)."),
    prompt_ids: list[str] = typer.Option([], help="Prompt as token ids, '1,2,3'; repeat for several."),
    prompts: str | None = typer.Option(
        None, help="File of prompts: a JSON object with 'prompt' and, if you like, 'topic' on each line."
    ),
    tokens: int = typer.Option(DEFAULT_TOKENS, help="Tokens to generate for each prompt."),
    micro_batch: int = typer.Option(2, help="Prompts computed together; equal values give bitwise equal results."),
    exchange: str = typer.Option(
        "auto",
        help="How rows move: peer (GPUs of one host), shm (CPU ranks of one host), gloo (sockets), hierarchical (CPU "
        "ranks of several hosts), or auto.",
    ),
    combine: str = typer.Option("exact", help="exact: same bits on any number of ranks; stable, fast: fewer bytes."),
    link: str = typer.Option("", help="Emulate a link of this rate between ranks, such as 200Gbps (shm)."),
    latency: str = typer.Option("", help="Latency of the emulated link, such as 5us."),
    dtype: str = typer.Option("float32", help="float32, bfloat16 or float16."),
    speeds: str = typer.Option("", help="Relative speed of each rank, '2,1,1': experts are shared out in proportion."),
    check: bool = typer.Option(False, "--check", help="Compare with one process; exit 1 if it differs."),
    trace: str | None = typer.Option(None, help="Record the routing to this file (.npz)."),
    topic: list[str] = typer.Option(
        [], help="Label of each prompt in the trace: first of each --prompt, then of each --prompt-ids."
    ),
    json_file: str | None = typer.Option(
        None, "--json", help="Write the results to this file; - prints them instead of the tables."
    ),
    overlap: str = typer.Option(
        "off",
        help="Compute while rows travel: microbatch (several in turn), tile (chunks of one), shared (one, beside "
        "its shared expert), off, or auto.",
    ),
    node_schedule: str = typer.Option(
        "together",
        help="Order of sending between hosts: together, rotated, staggered:GBPS, paced:GBPS or by-counts:GBPS[,FACTOR] "
        "(docs/hosts.md).",
    ),
    timeline: str | None = typer.Option(
        None, help="Write when each stage ran to this file, for Perfetto or chrome://tracing (.json)."
    ),
    slots: int = typer.Option(0, help=SLOTS_HELP),
    capacity_factor: float = typer.Option(0.0, help=CAPACITY_HELP),
    alpha: float | None = typer.Option(None, help=ALPHA_HELP),
    break_even: int | None = typer.Option(None, help="Rows below which no weights are copied (default: 1)."),
    deadline: float = typer.Option(60.0, help="Seconds any wait on another rank may take."),
    plan: str | None = typer.Option(None, help="plan.yaml of `bywash plan`; options given here go before it."),
    group: str = typer.Option("", help="Group of the plan (default: its first)."),
) -> None:
    """Run a MoE model with its experts spread over processes, and report what moved."""
    request = RunRequest(
        model=model,
        ranks=ranks,
        prompts=collect_prompts(prompt, prompt_ids, prompts, topic),
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
        json=json_file,
        deadline=deadline,
        overlap=overlap,
        node_schedule=node_schedule,
        timeline=timeline,
        slots=slots,
        capacity_factor=capacity_factor,
        alpha=alpha,
        break_even=break_even,
    )
    if plan is not None:
        from bywash.cli.run_plan import under_plan

        request = under_plan(request, plan, group, context)
    elif group:
        raise ConfigError(f"--group {group}: is of a plan; give --plan too")
    start_run(request)


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
    from bywash.launch.hosts import check_hosts
    from bywash.models.job import run_job

    options = _job_options(request)  # before joining: transformers writes presets on rank 0 alone once a group exists
    group = Group(rank=rank, ranks=ranks, store=store, deadline_s=request.deadline)
    try:
        for text in check_hosts(group):
            if rank == 0:
                typer.echo(f"warning: {text}", err=True)
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
    from bywash.exchange.node_schedule import NodeSchedule
    from bywash.moe.pipeline import MODES

    choices = {
        "overlap": MODES,
        "exchange": EXCHANGES,
        "combine": COMBINES,
        "dtype": ("float32", "bfloat16", "float16"),
    }
    for name, known in choices.items():
        if getattr(request, name) not in known:
            raise ConfigError(f"--{name} {getattr(request, name)}: choose one of {', '.join(known)}")
    for name in ("tokens", "micro_batch"):
        if getattr(request, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(request, name)}: must be at least 1")
    NodeSchedule.parse(request.node_schedule)
    _check_overflow(request)
    check_deadline(request.deadline)
    check_link(parse_link(request.link, request.latency), request.deadline)
    writable(request.json, "--json", or_stdout=True)
    replaceable(request.trace, "--trace")
    writable(request.timeline, "--timeline")
    apart({"--json": request.json, "--trace": request.trace, "--timeline": request.timeline})


def _check_overflow(request: RunRequest) -> None:
    for flag, value, least, most in (
        ("--slots", request.slots, 0, _MOST_SLOTS),
        ("--capacity-factor", request.capacity_factor, 0, 1 << 20),
        ("--alpha", request.alpha, 1, 64),
        ("--break-even", request.break_even, 1, 1 << 29),
    ):
        if value is not None and not least <= value <= most:
            raise ConfigError(f"{flag} {value:g}: must be {least} to {most}")
    for flag, given in (("--alpha", request.alpha), ("--break-even", request.break_even)):
        if given is not None and not request.slots:
            raise ConfigError(f"{flag} {given:g}: says which rows go to slots; give --slots too")
    if (request.slots or request.capacity_factor) and request.overlap != "off":
        raise ConfigError(
            f"--overlap {request.overlap}: slots and a capacity are for steps that travel at once; leave out --slots "
            "and --capacity-factor, or --overlap"
        )


def collect_prompts(
    texts: Sequence[str], ids: Sequence[str], file: str | None, topics: Sequence[str]
) -> tuple[Prompt, ...]:
    """The prompts of --prompt, then of --prompts FILE, then of --prompt-ids, each with its topic.

    --topic labels those of --prompt and --prompt-ids in this order; a file brings its own topics. All have one or none.
    """
    from_file = read_prompts(file) if file is not None else ()
    if from_file and topics:
        raise ConfigError("--topic: cannot label a --prompts file; give each of its lines a 'topic'")
    prompts: list[Prompt] = [(text, None) for text in texts]
    prompts += from_file
    prompts += [(_numbers(numbers, "--prompt-ids"), None) for numbers in ids]
    prompts = prompts or [(text, None) for text in DEFAULT_PROMPTS]
    if topics:
        if len(topics) != len(prompts):
            raise ConfigError(f"--topic is given {len(topics)} times for {len(prompts)} prompts: label each or none")
        prompts = [(prompt, topic) for (prompt, _), topic in zip(prompts, topics)]
    if len({topic is None for _, topic in prompts}) > 1:
        raise ConfigError(f"--prompts {file}: its prompts have topics, those of --prompt and --prompt-ids have none")
    for prompt, topic in prompts:
        for flag, text in (("--prompt", prompt), ("--topic", topic)):
            if isinstance(text, str) and not _is_unicode(text):
                raise ConfigError(f"{flag} {text!a}: is not valid UTF-8; convert it first")
    return tuple(prompts)


def read_prompts(file: str) -> tuple[Prompt, ...]:
    """The prompts of a JSON-lines file, in order; every line has a topic, or none has."""
    try:
        lines = [json.loads(line) for line in Path(file).read_text("utf-8").split("\n") if line.strip()]
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--prompts {file}: cannot read it as a JSON object on each line: {reason}") from error
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, start=1):
        fields = line if isinstance(line, dict) else {}
        prompt, topic = fields.get("prompt"), fields.get("topic")
        if not isinstance(prompt, str) or not isinstance(topic, str | None):
            raise ConfigError(
                f'--prompts {file}: prompt {number} must be an object like {{"prompt": "...", "topic": "..."}} with '
                f"strings in it"
            )
        prompts.append((prompt, topic))
    if not prompts:
        raise ConfigError(f"--prompts {file}: has no prompts; put a JSON object on each line")
    if len({topic is None for _, topic in prompts}) > 1:
        raise ConfigError(f"--prompts {file}: some lines have a 'topic' and some have none: label each or none")
    return tuple(prompts)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a surrogate stands for a byte that was no UTF-8
        return False
    return True


def _numbers(text: str, flag: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{flag} {text!r}: must be whole numbers with commas, for example 3,1,4") from None


def _job_options(request: RunRequest) -> "JobOptions":
    """Resolve names, tokenise, check against the model."""
    from bywash.models.job import JobOptions
    from bywash.models.loader import read_config, stop_ids
    from bywash.models.presets import model_directory
    from bywash.models.text import check_ids, text_for

    directory = model_directory(request.model)
    config = read_config(directory)
    prompts = [prompt for prompt, _ in request.prompts if not isinstance(prompt, str)]
    if len(prompts) < len(request.prompts):
        text = text_for(directory, config.vocab_size)
        prompts = [tuple(text.encode(p)) if isinstance(p, str) else p for p, _ in request.prompts]
    check_ids(prompts, config.vocab_size)
    longest, positions = max(len(p) for p in prompts) + request.tokens, config.max_position_embeddings
    if longest > positions:
        raise ConfigError(
            f"--tokens {request.tokens}: the longest prompt and its new tokens need {longest} positions, the model has "
            f"{positions}"
        )
    return JobOptions(
        directory=str(directory),
        prompts=tuple(prompts),
        new_tokens=request.tokens,
        micro_batch=min(request.micro_batch, len(prompts)),
        exchange=request.exchange,
        combine=request.combine,
        link=parse_link(request.link, request.latency),
        dtype=request.dtype,
        speeds=request.speeds,
        home=request.home,
        stop_ids=stop_ids(directory, config),
        deadline_s=request.deadline,
        check=request.check,
        trace=request.trace is not None,
        topics=tuple(topic for _, topic in request.prompts if topic is not None),
        overlap=request.overlap,
        node_schedule=request.node_schedule,
        timeline=request.timeline is not None,
        overflow=_overflow_options(request),
    )


def _overflow_options(request: RunRequest) -> "OverflowOptions | None":
    from bywash.models.overflow import OverflowOptions

    if not request.slots and not request.capacity_factor:
        return None
    return OverflowOptions(
        slots=request.slots,
        capacity_factor=request.capacity_factor,
        alpha_1024=round((DEFAULT_ALPHA if request.alpha is None else request.alpha) * 1024),
        break_even=request.break_even or 1,
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
        report = check_run(
            replace(options, device=results[0].device), tokens, logits, sum(r.router_mismatches or 0 for r in results)
        )
    console.close()
    traces = [r.trace for r in results if r.trace is not None]
    if request.trace:
        merge_traces(traces).save(request.trace)
    if request.timeline is not None:
        _write_timeline(request, results)
    outcome = result_json(request.model, options, results, tokens, report)
    if request.json is not None:
        write_json(request.json, outcome)
    if request.json != STDOUT:
        with printing():
            print_summary(options, results, tokens, outcome)
    failures = report.failures(options.combine) if report else []
    if failures:
        raise BywashError("the check failed: " + "; ".join(failures))


def _write_timeline(request: RunRequest, results: list["RankResult"]) -> None:
    from bywash.report.timeline import chrome_trace, tracks_of

    assert request.timeline is not None
    notes = {"model": request.model, "overlap": request.overlap, "emulated": results[0].emulated}
    write_json(request.timeline, chrome_trace(tracks_of([r.spans for r in results]), notes), "--timeline")
