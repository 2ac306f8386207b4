"""Data, from text to ranks: what preparing, loading and waiting for it cost.

Four parts, each in processes of its own:

* prepare: tokens of a JSONL text a CPU second, as `eth data prepare` makes them from file to file, against `tokenizers`
  alone on the same documents, which lie in memory and whose ids go nowhere; in turns, one process and one thread each.
* load: tokens a CPU second that shuffled batches are made of, from a sparse file of many tokens.
* memory: by how much the peak of a process's memory grows while it reads samples of ten epochs of that file, and
  by how much a shuffled table of these samples makes it grow.
* wait: the share of the iterations for which ranks of a pipeline of two stages stand still for their samples, and
  what reading them when they are asked for would take.

The text is Python's own sources, and the tokenizer a byte-level BPE that is trained on a part of them. CPU seconds are
those of the process; medians over turns. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from paired_runs import Shape, host_plan, training_of
from rank_processes import run_ranks

from actors.data_settings import TextSource
from actors.engine.batches import ReplicaBatches
from actors.engine.data import Samples
from actors.engine.tokens import TOKEN_TYPE, TokenFile
from actors.engine.trainer import Trainer, TrainerConfig
from actors.text.prepare import make_tokens
from planner.plan import Plan

MOST_WAIT = 0.005
"""Of the iteration, what ranks may wait for data."""

END = "<|endoftext|>"
# Documents that `tokenizers` gets at once, and samples of a global batch that is read.
_DOCUMENTS = 8
_BATCH = 64
_SHORT, _LONG = 128, 2048
_WARM_UP = 3


def write_text(folder: Path, *, megabytes: float) -> Path:
    """Python's sources as JSONL, a document a file, over and over until there are so many."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    path, left = folder / "text.jsonl", megabytes * 1e6
    with path.open("w", encoding="utf-8") as stream:
        while left > 0:
            for source in sources:
                line = json.dumps({"text": source.read_text(encoding="utf-8", errors="replace")}) + "\n"
                stream.write(line)
                left -= len(line)
                if left <= 0:
                    break
    return path


def documents_of(text: Path) -> list[str]:
    with text.open(encoding="utf-8") as stream:
        return [json.loads(line)["text"] for line in stream]


def train_tokenizer(documents: list[str], path: Path, *, vocabulary: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.save(str(path))


def apart(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's result, from a process of its own, so that its memory and seconds are nobody else's."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(function, arguments)


def one_thread() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)


def tokenized_alone(text: Path, tokenizer: Path) -> tuple[int, float]:
    """Tokens and CPU seconds of `tokenizers` on documents in memory."""
    one_thread()
    from tokenizers import Tokenizer

    loaded, documents = Tokenizer.from_file(str(tokenizer)), documents_of(text)
    count, began = 0, time.process_time()
    for first in range(0, len(documents), _DOCUMENTS):
        made = loaded.encode_batch_fast(documents[first : first + _DOCUMENTS], add_special_tokens=False)
        count += sum(len(one.ids) for one in made)
    return count, time.process_time() - began


def prepared(text: Path, tokenizer: Path, folder: Path) -> tuple[int, float]:
    """Tokens, without those that end documents, and CPU seconds from the file to token files."""
    one_thread()
    began = time.process_time()
    made = make_tokens(TextSource(text, tokenizer=tokenizer), cache_dir=folder)
    return made.count - made.header.documents, time.process_time() - began


def compare_preparing(folder: Path, *, megabytes: float, turns: int) -> dict[str, float]:
    text, tokenizer = write_text(folder, megabytes=megabytes), folder / "tokenizer.json"
    train_tokenizer(documents_of(text)[:100], tokenizer, vocabulary=8192)
    rates: dict[str, list[float]] = {"alone": [], "prepared": []}
    for turn in range(turns):
        alone, seconds = apart(tokenized_alone, text, tokenizer)
        rates["alone"].append(alone / seconds)
        count, seconds = apart(prepared, text, tokenizer, folder / f"tokens{turn}")
        rates["prepared"].append(count / seconds)
        # Documents of JSONL are not cut into pieces, so that both make the same tokens.
        assert count == alone, (count, alone)
    ratios = [ours / theirs for ours, theirs in zip(rates["prepared"], rates["alone"], strict=True)]
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(
        f"prepare: {medians['prepared']:,.0f} tokens/CPU s, tokenizers alone {medians['alone']:,.0f},"
        f" ratio {statistics.median(ratios):.3f}"
    )
    return {
        "prepare_tokens_per_cpu_second": round(medians["prepared"]),
        "tokenizers_tokens_per_cpu_second": round(medians["alone"]),
        "prepare_ratio": round(statistics.median(ratios), 4),
    }


def sparse_tokens(folder: Path, *, tokens: int) -> Path:
    """A file of so many tokens 0 that takes up no disk."""
    path = folder / f"{tokens}.tokens"
    with path.open("wb") as stream:
        stream.truncate(tokens * TOKEN_TYPE.itemsize)
    return path


class PeakMemory:
    """By how many bytes the process's memory has grown at most since this was made (Linux)."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self._before = self._bytes("VmRSS")

    def growth(self) -> int:
        return self._bytes("VmHWM") - self._before

    @staticmethod
    def _bytes(field: str) -> int:
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(lines[field].split()[0]) * 1024


def read_shuffled(path: Path, sequence: int, batches: int) -> tuple[float, int, int]:
    """Tokens a CPU second of batches spread over ten epochs, by how many bytes the process's peak grew, and by how
    many it grows with a shuffled table of the samples."""
    one_thread()
    tokens = TokenFile(path)
    windows = tokens.windows(sequence)
    samples = Samples(tokens, sequence_length=sequence, global_batch_size=_BATCH, seed=0)
    samples.batch(1, 0, _BATCH)
    memory, began = PeakMemory(), time.process_time()
    for number in range(batches):
        samples.batch(1 + number * (10 * windows // _BATCH) // batches, 0, _BATCH)
    seconds, grown = time.process_time() - began, memory.growth()
    memory = PeakMemory()
    table = np.random.default_rng(0).permutation(windows)
    assert len(table) == windows
    return batches * _BATCH * sequence / seconds, grown, memory.growth()


def measure_loading(folder: Path, *, tokens: int, batches: int, turns: int) -> dict[str, float]:
    path = sparse_tokens(folder, tokens=tokens)
    found = {
        sequence: [apart(read_shuffled, path, sequence, batches) for _ in range(turns)]
        for sequence in (_SHORT, _LONG)
    }
    rates = {sequence: statistics.median(rate for rate, _, _ in runs) for sequence, runs in found.items()}
    # Short samples are many: a table of them is large.
    grown, table = (max(run[which] for run in found[_SHORT]) for which in (1, 2))
    print(
        "load:",
        *(f"{rate:,.0f} tokens/CPU s in samples of {sequence};" for sequence, rate in rates.items()),
        f"memory: {tokens:,} tokens, peak grew by {grown / 1e6:.2f} MB, with a table of the samples of {_SHORT} by"
        f" {table / 1e6:.2f} MB",
    )
    return {
        **{f"load_{sequence}_tokens_per_cpu_second": round(rate) for sequence, rate in rates.items()},
        "shuffled_tokens": tokens,
        "peak_growth_bytes": grown,
        "table_growth_bytes": table,
    }


def trained(
    rank: int, world_size: int, store: dist.Store, config: TrainerConfig, iterations: int
) -> tuple[float, float, float]:
    """Of this rank's iterations after the first ones: wall seconds, those of waiting for data, and those that reading
    takes where it is done."""
    trainer = Trainer(config=config, rank=rank, store=store)
    reports = [trainer.run_iteration(iteration + 1) for iteration in range(_WARM_UP + iterations)][_WARM_UP:]
    trainer.close()
    reading = read_when_asked(config, rank, iterations=iterations)
    wall = reports[-1].end_time - reports[0].start_time
    return wall, sum(report.data_wait_seconds for report in reports), reading


def read_when_asked(config: TrainerConfig, rank: int, *, iterations: int) -> float:
    """Wall seconds of making the same batches one after the other, with nothing beside it."""
    plan = config.plan
    samples = Samples(
        TokenFile(config.tokens),
        sequence_length=plan.sequence_length,
        global_batch_size=plan.global_batch_size,
        seed=config.training.seed,
    )
    batches = ReplicaBatches(plan=plan, place=plan.ranks[rank], samples=samples)
    began = time.monotonic()
    for iteration in range(_WARM_UP + 1, _WARM_UP + iterations + 1):
        batches.counted(iteration)
        for index in range(plan.pipelines[0].micro_batches):
            batches.micro_batch(iteration, index)
    return time.monotonic() - began


def pipeline(*, hidden: int) -> Plan:
    return host_plan(
        Shape(layers=4, hidden=hidden, sequence=128, size=4, count=8), (((1, 1), (1, 1)),), overlap=False
    )


def measure_waiting(folder: Path, *, hidden: int, iterations: int) -> dict[str, float]:
    plan = pipeline(hidden=hidden)
    tokens = sparse_tokens(folder, tokens=10**8)
    config = TrainerConfig(plan=plan, training=training_of(plan), tokens=tokens, timeout_seconds=60)
    found = run_ranks(trained, plan.world_size, config, iterations)
    waited = max(waited / wall for wall, waited, _ in found)
    reading = max(reading / wall for wall, _, reading in found)
    print(
        f"wait: ranks stand still for {waited:.4%} of the iterations; reading when asked would take {reading:.2%}"
    )
    return {
        "wait_share": round(waited, 6),
        "reading_share": round(reading, 6),
        "wait_within": waited < MOST_WAIT,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=16.0, help="of text to prepare")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=10**9, help="of the sparse file")
    parser.add_argument("--batches", type=int, default=2000, help=f"of {_BATCH} samples that are read of it")
    parser.add_argument("--hidden", type=int, default=128, help="of the model whose ranks may wait")
    parser.add_argument("--iterations", type=int, default=40, help="of it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        result = {
            "benchmark": "data",
            **compare_preparing(folder, megabytes=options.megabytes, turns=options.turns),
            **measure_loading(
                folder,
                tokens=options.tokens,
                batches=options.batches,
                turns=options.turns,
            ),
            **measure_waiting(folder, hidden=options.hidden, iterations=options.iterations),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
