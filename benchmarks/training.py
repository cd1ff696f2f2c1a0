"""Steps of training on a mesh beside those of PyTorch's own means, in turns: DDP and FSDP2 under torchrun.

python -m benchmarks.training [--rounds 3] [--steps 20] [--compilers] [MODEL ...]
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.measure import figures_of

PROGRAM = str(Path(__file__).with_name("program_train.py"))
WHOLE = ("ddp", "sharded", "sharded+compiled")
COMPILERS = ("ddp+compile", "sharded+inductor")
CUT = ("fsdp", "sharded-fully", "sharded-fully+compiled")
TENSOR = ("tp", "sharded-tp", "sharded-tp+compiled")  # of llama alone
RANKS = 2


def milliseconds(means: str, model: str, steps: int) -> float:
    """Of the median step; NaN if it could not be measured."""
    ranks = 1 if means == "one" else RANKS
    command = [sys.executable, PROGRAM, means, model, str(steps), str(ranks)]
    if means.startswith(("ddp", "fsdp", "tp")):
        torchrun = ("-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--standalone")
        command[1:1] = torchrun
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=900, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    spread = figures_of(done.stdout).get(f"{model} {means}")
    if spread is None:
        sys.stderr.write(done.stderr[-2000:])
        return float("nan")
    return spread["p50"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["conv", "bert", "llama"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--compilers", action="store_true", help="with torch.compile and inductor, too")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    table: dict[str, dict[str, float]] = {}
    for model in options.models:
        groups = (WHOLE, CUT, *((COMPILERS,) if options.compilers else ()), *((TENSOR,) if model == "llama" else ()))
        means = ("one", *(way for group in groups for way in group))
        spent: dict[str, list[float]] = {way: [] for way in means}
        for _ in range(options.rounds):
            for way in means:
                spent[way].append(milliseconds(way, model, options.steps))
        best = table[model] = {way: min(times) for way, times in spent.items()}
        print(f"{model}: one process {best['one']:.1f} ms", flush=True)
        for peer, *ours in groups:
            ratios = ", ".join(f"{way} {best[way]:.1f} ({best[way] / best[peer]:.2f}×)" for way in ours)
            print(f"  {peer} {best[peer]:.1f} ms; {ratios}", flush=True)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
