"""Trains `bywash-tiny`, the byte-level Qwen3-MoE shipped with bywash, and a dense model of its active size.

    python examples/corpus.py --out .corpus --docs /usr/share/doc/python3.11/html/_sources
    python examples/train_tiny_moe.py --model moe --corpus .corpus --out .tiny    # minutes on one H200
    python examples/train_tiny_moe.py --model dense --corpus .corpus --out .tiny
    python examples/tiny_moe_card.py --corpus .corpus --run .tiny                 # weights, picture, card

Both see the same bytes in the same order under the same schedule: batch n is a function of (seed, n). A
stopped run resumes from its last checkpoint when called again. `--miniature` trains a toy in seconds.

Knows nothing of bywash: only torch and transformers (5.17 or newer). On a CPU a run repeats bit for bit; on a
GPU the atomic sums of the backward pass make two runs differ in the last digits.
"""

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import transformers
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3MoeConfig
from transformers.utils import logging

MIX = {"prose": 0.45, "code": 0.35, "tables": 0.2}
END_OF_TEXT = 256
VOCABULARY = 264  # 256 bytes, end of text, padding, six reserved


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes the two models share; the dense one has `top_k` experts' width in one MLP."""

    hidden: int = 256
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    experts: int = 32
    top_k: int = 4
    expert_width: int = 48
    context: int = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How to train: the same for both models."""

    steps: int = 1800
    batch: int = 128
    warmup: int = 200
    peak_lr: float = 2e-3
    final_lr: float = 1e-4
    weight_decay: float = 0.1
    clip: float = 1.0
    balance: float = 3e-3
    check_every: int = 200
    check_windows: int = 384
    seed: int = 20261129

    def lr(self, step: int) -> float:
        """Linear warm-up, then a cosine from the peak to the final rate."""
        if step < self.warmup:
            return self.peak_lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.final_lr + (self.peak_lr - self.final_lr) * (1 + math.cos(math.pi * done)) / 2


MINIATURE_SHAPE = Shape(
    hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16, experts=8, top_k=2, expert_width=16, context=64
)
MINIATURE_SCHEDULE = Schedule(steps=40, batch=8, warmup=5, check_every=10, check_windows=4)


# -- models ----------------------------------------------------------------------------------------


def configuration(kind: str, shape: Shape, balance: float) -> Qwen3MoeConfig | Qwen3Config:
    """The transformers configuration of the MoE or of the dense model of the same active size."""
    shared = {
        "vocab_size": VOCABULARY,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.top_k * shape.expert_width,
        "max_position_embeddings": shape.context,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": END_OF_TEXT,
        "pad_token_id": END_OF_TEXT + 1,
    }
    if kind == "dense":
        return Qwen3Config(**shared)
    return Qwen3MoeConfig(
        **shared,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        moe_intermediate_size=shape.expert_width,
        norm_topk_prob=True,
        router_aux_loss_coef=balance,
    )


def new_model(kind: str, shape: Shape, schedule: Schedule, device: torch.device) -> PreTrainedModel:
    """A freshly initialised model: bf16 on a GPU, float32 on a CPU."""
    torch.manual_seed(schedule.seed)
    on_gpu = device.type == "cuda"
    options = {"experts_implementation": "grouped_mm" if on_gpu else "eager"} if kind == "moe" else {}
    config = configuration(kind, shape, schedule.balance)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options)
    return model.to(device, torch.bfloat16 if on_gpu else torch.float32)


def parameters(kind: str, model: PreTrainedModel, shape: Shape) -> dict[str, int]:
    """Parameters in all, and those that one byte passes through."""
    total = sum(p.numel() for p in model.parameters())
    idle = (shape.experts - shape.top_k) * 3 * shape.hidden * shape.expert_width * shape.layers
    return {"total": total, "active": total - idle if kind == "moe" else total}


# -- data ------------------------------------------------------------------------------------------


def stream(path: Path) -> Tensor:
    """A corpus file as ids, int16 [bytes]: a byte is its own id, the NUL between documents END_OF_TEXT."""
    ids = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).to(torch.int16)
    ids[ids == 0] = END_OF_TEXT
    return ids


class Batches:
    """Windows of `context + 1` bytes, their topics drawn by `MIX`; batch n depends on (seed, n) alone."""

    def __init__(self, corpus: Path, context: int, batch: int, seed: int, device: torch.device) -> None:
        """Load the training streams onto the device."""
        streams = [stream(corpus / f"train.{topic}.txt") for topic in MIX]
        self.ids = torch.cat(streams).to(device)
        self.lengths = torch.tensor([len(s) for s in streams])
        self.offsets = self.lengths.cumsum(0) - self.lengths
        self.window = torch.arange(context + 1, device=device)
        self.context, self.batch, self.seed = context, batch, seed

    def __getitem__(self, step: int) -> Tensor:
        """Ids of batch `step`: int64 [batch, context + 1]."""
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        topic = torch.multinomial(torch.tensor(list(MIX.values())), self.batch, replacement=True, generator=draw)
        place = torch.rand(self.batch, generator=draw, dtype=torch.float64) * (self.lengths[topic] - self.context - 1)
        starts = (self.offsets[topic] + place.long()).to(self.ids.device)
        return self.ids[starts[:, None] + self.window].long()


def windows(corpus: Path, split: str, topic: str, context: int, most: int) -> Tensor:
    """The first `most` windows of a split, int64 [windows, context + 1]; no byte is predicted twice."""
    ids = stream(corpus / f"{split}.{topic}.txt").long()
    return ids.unfold(0, context + 1, context)[:most].contiguous()


# -- training --------------------------------------------------------------------------------------


def byte_losses(model: PreTrainedModel, ids: Tensor, router_logits: bool = False) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(nats of each predicted byte [windows, context]; router logits of each layer [bytes, experts])."""
    asked = {"output_router_logits": True} if router_logits else {}
    out = model.model(input_ids=ids[:, :-1], use_cache=False, **asked)
    logits = model.lm_head(out.last_hidden_state).float()
    losses = functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    return losses, out.router_logits if router_logits else ()


def balance_loss(router_logits: tuple[Tensor, ...], top_k: int) -> tuple[Tensor, Tensor]:
    """Switch-style balance, mean over layers (1 when even, experts / top_k at worst); load [layers, experts].

    Layer by layer, unlike transformers' own, which sums over layers and so lets them cancel out.
    """
    probabilities_LTE = torch.stack(router_logits).float().softmax(-1)
    chosen = probabilities_LTE.topk(top_k, dim=-1).indices.flatten(1)
    load_LE = torch.zeros_like(probabilities_LTE[:, 0]).scatter_add_(
        1, chosen, torch.ones_like(chosen, dtype=torch.float)
    )
    load_LE = load_LE / load_LE.sum(1, keepdim=True)
    return (load_LE * probabilities_LTE.mean(1)).sum(1).mean() * load_LE.shape[1], load_LE


class MasterAdamW:
    """AdamW on float32 copies of a model's weights; the model itself computes in its own dtype."""

    def __init__(self, model: PreTrainedModel, weight_decay: float) -> None:
        """Copy the weights; vectors (norms) are not decayed."""
        self.live = list(model.parameters())
        self.master = [p.detach().float().clone().requires_grad_() for p in self.live]
        groups = [
            {"params": [p for p in self.master if p.dim() > 1], "weight_decay": weight_decay},
            {"params": [p for p in self.master if p.dim() == 1], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=self.live[0].is_cuda)

    @torch.no_grad()
    def step(self, lr: float, clip: float) -> None:
        """Take the model's gradients, clip them, update, and write the weights back."""
        for master, live in zip(self.master, self.live):
            master.grad = live.grad.float()
            live.grad = None
        torch.nn.utils.clip_grad_norm_(self.master, clip)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        torch._foreach_copy_(self.live, self.master)

    def state(self) -> dict[str, object]:
        """What `restore` needs."""
        return {"master": self.master, "adamw": self.adamw.state_dict()}

    @torch.no_grad()
    def restore(self, state: dict[str, object]) -> None:
        """Continue from `state()`."""
        torch._foreach_copy_(self.master, state["master"])
        torch._foreach_copy_(self.live, self.master)
        self.adamw.load_state_dict(state["adamw"])


@torch.no_grad()
def losses_by_topic(model: PreTrainedModel, corpus: Path, split: str, context: int, most: int) -> dict[str, float]:
    """Nats per byte of each topic of a split, and of their mix as trained."""
    model.eval()
    losses = {}
    for topic in MIX:
        parts = windows(corpus, split, topic, context, most).split(64)
        total = sum(byte_losses(model, ids.to(model.device))[0].sum(dtype=torch.float64).item() for ids in parts)
        losses[topic] = total / sum(ids.shape[0] * context for ids in parts)
    losses["mix"] = sum(share * losses[topic] for topic, share in MIX.items())
    model.train()
    return losses


class Run:
    """One model's training and its folder: `log.jsonl`, `settings.json`, `state.pt` to resume from, `best/` weights."""

    def __init__(
        self, kind: str, corpus: Path, out: Path, shape: Shape, schedule: Schedule, device: torch.device
    ) -> None:
        """Start afresh, or resume if the folder holds a state."""
        self.kind, self.shape, self.schedule = kind, shape, schedule
        self.corpus, self.out = corpus, out / kind
        self.out.mkdir(parents=True, exist_ok=True)
        (out / ".gitignore").write_text("*\n")
        self.model = new_model(kind, shape, schedule, device)
        self.adamw = MasterAdamW(self.model, schedule.weight_decay)
        self.batches = Batches(corpus, shape.context, schedule.batch, schedule.seed, device)
        self.step, self.best, self.seconds, self.log = 0, math.inf, 0.0, []
        if (self.out / "state.pt").exists():
            self.resume(device)
        settings = {
            "made_with": self.made_with(),
            "parameters": parameters(kind, self.model, shape),
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        }
        (self.out / "settings.json").write_text(json.dumps(settings, indent=1) + "\n")

    def resume(self, device: torch.device) -> None:
        """Load the last state; it must come from the same shape and schedule."""
        state = torch.load(self.out / "state.pt", map_location=device, weights_only=True)
        if state["made_with"] != self.made_with():
            raise SystemExit(f"{self.out}/state.pt was trained with other settings: choose another --out or delete it")
        self.adamw.restore(state["optimizer"])
        self.step, self.best, self.seconds, self.log = (state[k] for k in ("step", "best", "seconds", "log"))
        print(f"{self.kind}: resuming after step {self.step}", flush=True)

    def made_with(self) -> dict[str, object]:
        """The settings a state belongs to."""
        return {"kind": self.kind, **asdict(self.shape), **asdict(self.schedule)}

    def train(self, until: int) -> None:
        """Train to step `until`, checking and saving every `check_every` steps and at the end."""
        losses, start = [], time.monotonic()
        for step in range(self.step, min(until, self.schedule.steps)):
            losses.append(self.one_step(step))
            self.step = step + 1
            if self.step % self.schedule.check_every == 0 or self.step == self.schedule.steps:
                trained = torch.stack(losses).double().mean(0).tolist()
                self.seconds += time.monotonic() - start
                self.check(trained)
                losses, start = [], time.monotonic()

    def one_step(self, step: int) -> Tensor:
        """One update; returns (nats per byte, busiest expert over the mean) without waiting for a GPU."""
        ids = self.batches[step]
        losses, router_logits = byte_losses(self.model, ids, router_logits=self.kind == "moe")
        loss, busiest = losses.mean(), torch.ones_like(losses[0, 0])
        objective = loss
        if router_logits:
            balance, load_LE = balance_loss(router_logits, self.shape.top_k)
            objective = loss + self.schedule.balance * balance
            busiest = load_LE.amax(1).mean() * self.shape.experts
        objective.backward()
        self.adamw.step(self.schedule.lr(step), self.schedule.clip)
        return torch.stack([loss, busiest]).detach()

    def check(self, trained: list[float]) -> None:
        """Validate, keep the weights if they are the best so far, log, and save the state."""
        limit = self.schedule.check_windows
        validation = losses_by_topic(self.model, self.corpus, "validation", self.shape.context, limit)
        if validation["mix"] < self.best:
            self.best = validation["mix"]
            self.model.save_pretrained(self.out / "best")
        seen = self.step * self.schedule.batch * self.shape.context
        line = {
            "step": self.step,
            "bytes": seen,
            "lr": self.schedule.lr(self.step - 1),
            "train": trained[0],
            "validation": validation,
            "busiest_over_mean": trained[1],
            "seconds": round(self.seconds, 1),
        }
        self.log.append(line)
        (self.out / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in self.log))
        print(
            f"{self.kind} step {self.step}: train {trained[0]:.4f} validation {validation['mix']:.4f} "
            f"busiest/mean {trained[1]:.2f} {seen / self.seconds / 1e6:.2f} MB/s",
            flush=True,
        )
        state = {"made_with": self.made_with(), "optimizer": self.adamw.state(), "step": self.step}
        torch.save(state | {"best": self.best, "seconds": self.seconds, "log": self.log}, self.out / "state.new")
        (self.out / "state.new").replace(self.out / "state.pt")


# -- command line ----------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=("moe", "dense"), default="moe", help="which model (default: moe)")
    parser.add_argument("--corpus", type=Path, default=Path(".corpus"), help="folder written by corpus.py")
    parser.add_argument("--out", type=Path, default=Path(".tiny"), help="folder for checkpoints and logs")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="torch device")
    parser.add_argument("--miniature", action="store_true", help="a toy model for a CPU, trained in seconds")
    parser.add_argument("--until", type=int, default=10**9, help="leave off after this step; a later call resumes")
    for name in ("steps", "seed", "batch"):
        parser.add_argument(f"--{name}", type=int, help=f"default: {getattr(Schedule(), name)}")
    return parser.parse_args()


def main() -> None:
    """Train one model."""
    args = arguments()
    logging.disable_progress_bar()
    shape, schedule = (MINIATURE_SHAPE, MINIATURE_SCHEDULE) if args.miniature else (Shape(), Schedule())
    chosen = {name: getattr(args, name) for name in ("steps", "seed", "batch") if getattr(args, name) is not None}
    schedule = replace(schedule, **chosen)
    if not (args.corpus / "corpus.json").exists():
        raise SystemExit(f"{args.corpus} holds no corpus: run `python examples/corpus.py --out {args.corpus}` first")
    Run(args.model, args.corpus, args.out, shape, schedule, torch.device(args.device)).train(args.until)


if __name__ == "__main__":
    main()
