"""Makes the folder that ships from a finished run: weights, byte tokenizer, logs, pictures and the model card.

    python examples/tiny_moe_card.py --corpus .corpus --run .tiny --out src/bywash/models/shipped/bywash-tiny

Recomputes the losses of the kept weights in float32, counts which experts each topic of the validation split is
routed to, and writes both as data (`training_log.json`, `routing_by_topic.json`) and, by filling in
`tiny_moe_card.md`, as the tables of `README.md`.

Knows nothing of how the models were trained beyond what `train_tiny_moe.py` left in the run's folder.
Needs matplotlib beside torch and transformers.
"""

import argparse
import json
import shutil
from collections.abc import Sequence
from contextlib import contextmanager, nullcontext
from itertools import combinations
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib
import torch
from matplotlib import pyplot
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging

from train_tiny_moe import MIX, byte_losses, windows

TOPICS = tuple(MIX)
SHIPPED = Path(__file__).parents[1] / "src/bywash/models/shipped/bywash-tiny"
PROMPTS = {
    "prose": "The following functions return a",
    "code": "def read_config(path):\n",
    "tables": "| code | char | category | name |\n| --- | --- | --- | --- |\n",
}

# -- tokenizer --------------------------------------------------------------------------------------


def printable_bytes() -> list[str]:
    """The character that stands for each byte in byte-level tokenizers (GPT-2's table), by byte."""
    plain = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(shifted)) for byte in range(256)]


def byte_tokenizer(context: int) -> PreTrainedTokenizerFast:
    """A byte is its own id; 256 ends a text, 257 pads, 258-263 are reserved. Nothing is added or normalised."""
    vocabulary = {character: byte for byte, character in enumerate(printable_bytes())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|pad|>", *(f"<|reserved_{i}|>" for i in range(6))])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        pad_token="<|pad|>",
        clean_up_tokenization_spaces=False,
        model_max_length=context,
        padding_side="left",
    )


# -- losses and routing -----------------------------------------------------------------------------


@contextmanager
def counted_experts(model: PreTrainedModel, counts_LE: Tensor):
    """While inside, add the model's choices of experts to int64 `counts_LE` [layers, experts]."""

    def add(layer: int, output: tuple[Tensor, ...]) -> None:
        counts_LE[layer] += torch.bincount(output[2].reshape(-1), minlength=counts_LE.shape[1])

    gates = [layer.mlp.gate for layer in model.model.layers]
    hooks = [gate.register_forward_hook(lambda _m, _i, out, n=n: add(n, out)) for n, gate in enumerate(gates)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def mean_loss(model: PreTrainedModel, ids: Tensor) -> float:
    """Nats per byte over windows [windows, context + 1]."""
    losses = [byte_losses(model, part)[0].sum(dtype=torch.float64).item() for part in ids.split(16)]
    return sum(losses) / (ids.shape[0] * (ids.shape[1] - 1))


def with_mix(losses: dict[str, float]) -> dict[str, float]:
    """The losses and their mean weighted as the topics were in training."""
    return losses | {"mix": sum(share * losses[topic] for topic, share in MIX.items())}


def measured(
    model: PreTrainedModel, corpus: Path, made: dict[str, Any], routing: dict[str, list[Any]] | None
) -> dict[str, dict[str, float]]:
    """Nats per byte by split and topic; into `routing`, per topic, the counts of each half of the validation split."""
    losses = {}
    for split in ("validation", "test"):
        by_topic = {}
        for topic in TOPICS:
            ids = windows(corpus, split, topic, made["context"], made["check_windows"])
            halves = []
            for half in ids.tensor_split(2):
                counts_LE = torch.zeros(made["layers"], made["experts"], dtype=torch.int64)
                with counted_experts(model, counts_LE) if routing is not None else nullcontext():
                    halves.append(mean_loss(model, half) * len(half) / len(ids))
                if routing is not None and split == "validation":
                    routing.setdefault(topic, []).append(counts_LE.tolist())
            by_topic[topic] = sum(halves)
        losses[split] = with_mix(by_topic)
    return losses


def total_variation(left_LE: Tensor, right_LE: Tensor) -> Tensor:
    """Half the summed difference of two shares per layer: 0 when alike, 1 when no expert is shared."""
    return (left_LE - right_LE).abs().sum(1) / 2


def shares(counts: Any) -> Tensor:
    """Counts [..., experts] as shares that sum to one."""
    counts = torch.tensor(counts, dtype=torch.float64)
    return counts / counts.sum(-1, keepdim=True)


def compared(routing: dict[str, list[Any]], hot: int) -> dict[str, Any]:
    """Per layer: each topic's busiest/mean and hottest experts, and pairwise distances beside those of halves."""
    by_topic = {topic: shares(torch.tensor(halves).sum(0).tolist()) for topic, halves in routing.items()}
    hottest = {topic: share.topk(hot, dim=1).indices.tolist() for topic, share in by_topic.items()}
    pairs = {}
    for a, b in combinations(TOPICS, 2):
        common = [len({*x} & {*y}) for x, y in zip(hottest[a], hottest[b])]
        pairs[f"{a} / {b}"] = {"distance": total_variation(by_topic[a], by_topic[b]).tolist(), "hot in common": common}
    return {
        "busiest_over_mean": {topic: (s.amax(1) * s.shape[1]).tolist() for topic, s in by_topic.items()},
        "hottest": hottest,
        "pairs": pairs,
        "halves": {topic: total_variation(*shares(halves)).tolist() for topic, halves in routing.items()},
    }


# -- pictures ---------------------------------------------------------------------------------------


def loss_picture(logs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Training and validation loss of both models over the bytes seen."""
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for colour, name, log in (("tab:blue", "MoE", logs["moe"]), ("tab:orange", "dense", logs["dense"])):
        seen = [line["bytes"] / 1e6 for line in log]
        axes.plot(seen, [line["validation"]["mix"] for line in log], color=colour, label=f"{name}, validation")
        axes.plot(seen, [line["train"] for line in log], color=colour, linestyle=":", label=f"{name}, training")
        best = min(log, key=lambda line: line["validation"]["mix"])
        axes.plot(best["bytes"] / 1e6, best["validation"]["mix"], "o", color=colour)
    axes.set(xlabel="bytes seen, millions", ylabel="nats per byte", ylim=(0.6, 1.2))
    axes.set_title("bywash-tiny and a dense model of its active size (dot: weights kept)", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def experts_picture(routing: dict[str, list[Any]], path: Path) -> None:
    """Load of every expert over its layer's mean, a panel per topic."""
    figure, panels = pyplot.subplots(3, 1, figsize=(7, 5.2), layout="constrained", sharex=True)
    for axes, topic in zip(panels, TOPICS):
        share = shares(torch.tensor(routing[topic]).sum(0).tolist())
        image = axes.imshow(share * share.shape[1], vmin=0, vmax=3, cmap="magma", aspect="auto")
        axes.set(ylabel="layer", title=topic)
    panels[-1].set_xlabel("expert")
    figure.colorbar(image, ax=list(panels), label="rows over the mean of the layer")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


# -- model card -------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def loss_table(losses: dict[str, Any], logs: dict[str, Any], settings: dict[str, Any]) -> str:
    """The MoE beside the dense model: at equal bytes, and the weights kept of each."""
    columns = (*TOPICS, "mix")
    equal = min(logs["moe"][-1]["step"], logs["dense"][-1]["step"])
    rows = []
    for kind, name in (("moe", "MoE"), ("dense", "dense")):
        at_equal = next(line for line in logs[kind] if line["step"] == equal)
        best = min(logs[kind], key=lambda line: line["validation"]["mix"])
        size = settings[kind]["parameters"]
        name = f"{name}, {size['active'] / 1e6:.2f} M active of {size['total'] / 1e6:.2f} M"
        cases = {
            f"validation, both at {at_equal['bytes'] / 1e6:.0f} MB (step {equal})": at_equal["validation"],
            f"validation, weights kept (step {best['step']})": losses[kind]["validation"],
            f"test, weights kept (step {best['step']})": losses[kind]["test"],
        }
        rows += [(name, case, *(f"{loss[column]:.4f}" for column in columns)) for case, loss in cases.items()]
    rows.sort(key=lambda row: ("test" in row[1], "kept" in row[1]))
    return table(("model", "nats per byte", *columns), rows)


def routing_tables(comparison: dict[str, Any]) -> str:
    """The hottest experts of each topic, and how far apart the topics' loads are."""
    hot, busiest = comparison["hottest"], comparison["busiest_over_mean"]
    layers = range(len(hot["prose"]))
    first = [
        (n, *(" ".join(map(str, hot[topic][n])) for topic in TOPICS), *(f"{busiest[topic][n]:.2f}" for topic in TOPICS))
        for n in layers
    ]
    header = ("layer", *(f"hottest: {topic}" for topic in TOPICS), *(f"busiest/mean: {topic}" for topic in TOPICS))
    pairs, halves = comparison["pairs"], comparison["halves"]
    second = [
        (
            n,
            *(f"{pair['distance'][n]:.2f} ({pair['hot in common'][n]})" for pair in pairs.values()),
            *(f"{halves[topic][n]:.2f}" for topic in TOPICS),
        )
        for n in layers
    ]
    return table(header, first) + "\n\n" + table(("layer", *pairs, *(f"{t}, own halves" for t in TOPICS)), second)


@torch.no_grad()
def samples(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> str:
    """What the model writes after each prompt, at temperature 0.6 from seed 0."""
    parts = []
    for topic, prompt in PROMPTS.items():
        torch.manual_seed(0)
        ids = tokenizer(prompt, return_tensors="pt")
        out = model.generate(**ids, max_new_tokens=240, do_sample=True, temperature=0.6, top_k=0)
        text = tokenizer.decode(out[0], skip_special_tokens=True).replace("\ufffd", "")
        parts.append(f"{topic}:\n\n~~~text\n{text}\n~~~")
    return "\n\n".join(parts)


def commands(settings: dict[str, Any], logs: dict[str, Any]) -> str:
    """The commands that repeat the run."""
    made = settings["moe"]["made_with"]
    lines = ["python examples/corpus.py --out .corpus --docs /usr/share/doc/python3.11/html/_sources"]
    for kind in ("moe", "dense"):
        line = f"python examples/train_tiny_moe.py --model {kind} --steps {made['steps']} --seed {made['seed']}"
        last = logs[kind][-1]["step"]
        lines.append(line + (f" --until {last}" if last < made["steps"] else ""))
    return "\n".join([*lines, "python examples/tiny_moe_card.py"])


def conditions(settings: dict[str, Any], logs: dict[str, Any], corpus: dict[str, Any], note: str) -> str:
    """Two paragraphs: where, for how long and on what both models were trained; how each run ended."""
    moe = settings["moe"]
    made, last = moe["made_with"], {kind: log[-1] for kind, log in logs.items()}
    ends = " ".join(ending(name, logs[kind], made) for kind, name in (("moe", "MoE"), ("dense", "dense")))
    trained = (
        f"One {moe['device']}, bf16 weights with float32 master copies, torch {moe['versions']['torch']}, transformers "
        f"{moe['versions']['transformers']}. AdamW, batches of {made['batch']} x {made['context']} bytes, rate up to "
        f"{made['peak_lr']} in {made['warmup']} steps, then a cosine to {made['final_lr']}, balance loss "
        f"{made['balance']} x Switch's per layer (1e-2 is usual; the skew is wanted). "
        f"{last['moe']['bytes'] / 1e6:.0f} MB for the MoE, its updates in {last['moe']['seconds']:.0f} s; "
        f"{last['dense']['bytes'] / 1e6:.0f} MB for the dense model, in {last['dense']['seconds']:.0f} s{note}. "
        f"Corpus of Python {corpus['python']}."
    )
    return "\n\n".join(fill(text, 120, break_on_hyphens=False) for text in (trained, ends))


def ending(name: str, log: list[dict[str, Any]], made: dict[str, Any]) -> str:
    """How a run ended: its last step of those planned, and what its losses did after the weights kept."""
    last, best = log[-1], min(log, key=lambda line: line["validation"]["mix"])
    text = f"The {name} model's run ended at step {last['step']} of {made['steps']}"
    if best is last:
        return f"{text}, at its lowest validation loss."
    worst = max(TOPICS, key=lambda topic: last["validation"][topic] - best["validation"][topic])
    return (
        f"{text}; its validation loss was lowest at step {best['step']} ({best['validation']['mix']:.4f}) and rose to "
        f"{last['validation']['mix']:.4f} at the end, most on {worst}, while its training loss still fell from "
        f"{best['train']:.4f} to {last['train']:.4f}: overfitting. Kept are the weights of step {best['step']}."
    )


def card(losses: Any, comparison: Any, logs: Any, settings: Any, corpus: Any, written: str, note: str) -> str:
    """The model card."""
    sizes = [(n, f"{f['bytes']:,}", f["documents"], f["sha256"][:16]) for n, f in corpus["files"].items()]
    made = settings["moe"]["made_with"]
    return (
        Path(__file__)
        .with_suffix(".md")
        .read_text()
        .format(
            **made,
            total=settings["moe"]["parameters"]["total"] / 1e6,
            active=settings["moe"]["parameters"]["active"] / 1e6,
            losses=loss_table(losses, logs, settings),
            commands=commands(settings, logs),
            conditions=conditions(settings, logs, corpus, note),
            routing=routing_tables(comparison),
            samples=written,
            sizes=table(("file", "bytes", "documents", "sha256"), sizes),
        )
    )


def ship_weights(best: Path, out: Path) -> None:
    """Copy weights and configuration, readable by all."""
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copyfile(best / name, out / name)


def main() -> None:
    """Read the run, measure, and write the folder."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--corpus", type=Path, default=Path(".corpus"), help="folder written by corpus.py")
    parser.add_argument("--run", type=Path, default=Path(".tiny"), help="folder written by train_tiny_moe.py")
    parser.add_argument("--out", type=Path, default=SHIPPED, help="folder to write")
    parser.add_argument("--note", default="", help="what else to say of the training time, as ' (with ...)'")
    args = parser.parse_args()
    logging.disable_progress_bar()
    matplotlib.use("Agg")
    args.out.mkdir(parents=True, exist_ok=True)
    kinds = ("moe", "dense")
    settings = {kind: json.loads((args.run / kind / "settings.json").read_text()) for kind in kinds}
    logs = {k: [json.loads(x) for x in (args.run / k / "log.jsonl").read_text().splitlines()] for k in kinds}
    made, routing, losses = settings["moe"]["made_with"], {}, {}
    for kind in kinds:
        model = AutoModelForCausalLM.from_pretrained(args.run / kind / "best", dtype=torch.float32).eval()
        losses[kind] = measured(model, args.corpus, made, routing if kind == "moe" else None)
        print(f"{kind}: {losses[kind]}", flush=True)
    ship_weights(args.run / "moe" / "best", args.out)
    tokenizer = byte_tokenizer(made["context"])
    tokenizer.save_pretrained(args.out)
    comparison = compared(routing, hot=4)
    model = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32).eval()
    corpus = json.loads((args.corpus / "corpus.json").read_text())
    text = card(losses, comparison, logs, settings, corpus, samples(model, tokenizer), args.note)
    (args.out / "README.md").write_text(text)
    write_json(args.out / "routing_by_topic.json", {"counts": routing, **comparison})
    write_json(args.out / "training_log.json", {"settings": settings, "logs": logs, "losses": losses, "corpus": corpus})
    loss_picture(logs, args.out / "loss.png")
    experts_picture(routing, args.out / "experts.png")


def write_json(path: Path, value: Any) -> None:
    """Write compactly, one top-level entry a line, floats to six digits."""
    rounded = json.loads(json.dumps(value), parse_float=lambda x: round(float(x), 6))
    lines = [f"{json.dumps(key)}: {json.dumps(entry)}" for key, entry in rounded.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
