"""Records the routing traces that ship with bywash, from the shipped model, through `bywash trace record`.

    python examples/corpus.py --out .corpus          # builds the text from your Python installation
    python examples/record_traces.py --corpus .corpus --out traces

Prompts are passages of the corpus's test split, which the model was not trained on. The traces hold expert ids and
weights, no text. `prose`, `code` and `tables` have one topic each; in `mixed` the topics take turns.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

TOPICS = ("prose", "code", "tables")
PROMPTS, PROMPT_BYTES, NEW_TOKENS = 16, 256, 96


def passages(corpus: Path, topic: str, count: int, seed: int) -> list[str]:
    """`count` passages of `PROMPT_BYTES` bytes (a little less where a character would be cut), one per document."""
    documents = (corpus / f"test.{topic}.txt").read_text(encoding="utf-8").split("\0")
    long = [text.encode() for text in documents if len(text.encode()) >= 2 * PROMPT_BYTES]
    chosen = random.Random(seed).sample(long, min(count, len(long)))
    return [text[:PROMPT_BYTES].decode(errors="ignore") for text in chosen]


def record(prompts: list[dict[str, str]], out: Path, tokens: int) -> None:
    """Run `bywash trace record` on the prompts."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
        file.write("".join(json.dumps(prompt) + "\n" for prompt in prompts))
        file.flush()
        command = [sys.executable, "-m", "bywash", "trace", "record", "--prompts", file.name, "--out", str(out)]
        subprocess.run([*command, "--ranks", "2", "--tokens", str(tokens)], check=True)


def main() -> None:
    """Record the four traces."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, default=Path(".corpus"), help="folder written by corpus.py")
    parser.add_argument("--out", type=Path, required=True, help="folder for the traces")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="prompts per topic")
    parser.add_argument("--tokens", type=int, default=NEW_TOKENS, help="tokens to generate for each")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    texts = {topic: passages(options.corpus, topic, options.prompts, seed=1) for topic in TOPICS}
    for topic in TOPICS:
        record([{"prompt": t, "topic": topic} for t in texts[topic]], options.out / f"{topic}.npz", options.tokens)
    turns = [(topic, texts[topic][i]) for i in range(options.prompts // 2) for topic in TOPICS if i < len(texts[topic])]
    record([{"prompt": text, "topic": topic} for topic, text in turns], options.out / "mixed.npz", options.tokens)


if __name__ == "__main__":
    main()
